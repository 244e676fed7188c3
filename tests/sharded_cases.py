"""What every rank does in tests of schedules on a sharded transformer, beside one process that has it whole."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from stretto.models.lora import attach_lora, lora_off
from stretto.models.sharded import blocks_of, shard_transformer
from stretto.models.trainable import make_full, trainable_parameters
from stretto.overlap import FsdpReducer
from stretto.policy import (
    AdvantageRule,
    Batch,
    KeyedNoise,
    Late,
    LateHybrid,
    Objective,
    Policy,
    Process,
    Reducer,
    SampleKey,
    make_schedule,
    make_sigmas,
)
from tests import tiny
from tests.overlap.fsdp_cases import Counts, own_groups
from tests.policy.toy import Noise64, make_rewards, run

TRAINED = (0, 1, 2)
IMAGE_IDS = torch.cartesian_prod(torch.zeros(1), torch.arange(2.0), torch.arange(3.0))


def make_policy(case: dict[str, Any], *, mesh: Any = None) -> tuple[Policy, list[Any]]:
    """A policy around a tiny FLUX transformer, and what of it is wrapped where there is a mesh."""
    dtype = getattr(torch, case["dtype"])
    transformer: Any = tiny.flux_transformer(single_layers=2)
    if case["tuning"] == "lora":
        attach_lora(transformer, rank=4, alpha=8, targets=["attn.to_q", "ff.net.2", "proj_mlp"], seed=0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in trainable_parameters(transformer).items():
                if "lora_B" in name:
                    p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    else:
        make_full(transformer)
    transformer.to(dtype)
    if case.get("checkpointing"):
        transformer.enable_gradient_checkpointing()
    compute = torch.bfloat16 if case.get("bf16") else None
    modules = [] if mesh is None else shard_transformer(transformer, mesh, compute_dtype=compute)

    def velocity(latents: torch.Tensor, sigma: torch.Tensor, condition: dict[str, torch.Tensor]) -> torch.Tensor:
        output = transformer(
            hidden_states=latents,
            timestep=sigma,
            guidance=torch.full_like(sigma, 3.5),
            pooled_projections=condition["text"][:, 0],
            encoder_hidden_states=condition["text"],
            txt_ids=torch.zeros(2, 3),
            img_ids=IMAGE_IDS,
            return_dict=False,
        )[0]
        return output.to(latents.dtype)

    def reference(latents: torch.Tensor, sigma: torch.Tensor, condition: dict[str, torch.Tensor]) -> torch.Tensor:
        if case["tuning"] == "full":
            return 0.5 * latents - 0.1
        with lora_off(transformer):
            return velocity(latents, sigma, condition)

    policy = Policy(
        velocity=velocity,
        parameters=trainable_parameters(transformer),
        process=Process(make_sigmas("shifted", 4, shift=3.0), "flow_sde", 0.7),
        objective=Objective(kl_beta=case.get("kl", 0.0)),
        noise=(Noise64 if dtype is torch.float64 else KeyedNoise)(0, (6, 4)),
        module=transformer,
        reference=reference if case.get("kl") else None,
        autocast=compute,
        in_lockstep=mesh is not None,
    )
    return policy, modules


def make_batch(case: dict[str, Any], prompt: int, sample: int) -> Batch:
    """One sample; beyond the group's own, a companion."""
    random = torch.Generator().manual_seed(prompt)
    text = torch.randn(1, 2, tiny.TEXT_DIM, generator=random).to(getattr(torch, case["dtype"]))
    key = SampleKey(0, prompt, sample)
    return Batch((key,), {"text": text}, TRAINED, is_companion=sample >= case["samples"])


def gradient_in_one_process(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """By the stock schedule on the whole model; rewards as `sharded` has them."""
    policy, _ = make_policy(case)
    batches = [make_batch(case, p, m) for p in range(2) for m in range(case["samples"])]
    options = {"retain_last": case["retain"]} if case["schedule"] == "hybrid" else {}
    return run(case["schedule"], policy, batches, rewards_of(case), rule_of(case), **options)[0]


def rewards_of(case: dict[str, Any]) -> torch.Tensor:
    rewards = make_rewards(2, case["samples"])
    if case.get("zero_spread"):
        rewards[0] = 1.0
    return rewards


def rule_of(case: dict[str, Any]) -> AdvantageRule:
    return AdvantageRule(clamp=case.get("clamp", 5.0))


def sharded(case: dict[str, Any]) -> dict[str, Any]:
    """Two iterations of two prompt groups; of the second the gradient (rank 0), what was sent and what was run."""
    warnings.filterwarnings("error", message="FSDP2-wrapped module")  # none reaches a user
    n, copies = dist.get_world_size(), case.get("copies", 1)
    mesh = init_device_mesh("cpu", (copies, n // copies), mesh_dim_names=("replicate", "shard"))
    policy, modules = make_policy(case, mesh=mesh["shard"])
    reducer = None
    if case["reduction"] != "per_step":
        group, replicate = own_groups(mesh)
        reducer = FsdpReducer(
            modules, group, hold=case["reduction"], send=case.get("send", "last"),
            replicate_group=replicate if copies > 1 else None,
        )  # fmt: skip
    schedule: Any
    if case["schedule"] in ("reweight", "hybrid"):
        taken: Reducer = reducer  # type: ignore[assignment]
        options = {"retain_last": case["retain"]} if case["schedule"] == "hybrid" else {}
        kind: Any = LateHybrid if options else Late
        schedule = kind(policy, taken, rule_of(case), case["samples"], **options)
    else:
        schedule = make_schedule(case["schedule"], policy, rule=rule_of(case), num_samples=case["samples"])
    versions = set()
    for _ in range(2):
        counts, before = Counts(), 0 if reducer is None else reducer.num_sent
        policy.module.zero_grad()
        policy.counter.take()
        versions.add(policy.version)
        with counts:
            schedule_rows = iteration(case, schedule, reducer)
    assert len(versions) == 1, "nothing has moved the weights"
    if case.get("step"):
        torch.optim.AdamW(policy.parameters.values(), lr=0.1).step()
        assert policy.version not in versions, "a step moves the weights, also those that are sharded"
    sent = 0 if reducer is None else reducer.num_sent - before
    if reducer is not None:
        reducer.close()
    gradient = {name: p.grad.full_tensor() for name, p in policy.parameters.items()}
    work = {key: value for key, value in policy.counter.take().items() if key in ("forwards", "backwards")}
    rows = {"rows": schedule_rows}
    return {"gradient": gradient if dist.get_rank() == 0 else None, "sent": sent, **counts.of, **work, **rows}


def iteration(case: dict[str, Any], schedule: Any, reducer: FsdpReducer | None) -> int:
    """A rank without a sample in a round runs a companion; the rows that this rank's statistics have."""
    rank, n = dist.get_rank(), dist.get_world_size()
    rewards, rule, num_samples = rewards_of(case), rule_of(case), case["samples"]
    values, scale, rows = rule(rewards).values, 1 / (2 * num_samples * len(TRAINED)), 0
    for prompt in range(2):
        trajectories, worth, own = [], [], []
        for first in range(0, num_samples, n):
            samples = [first + r for r in range(n)]
            has_sample = torch.tensor([m < num_samples for m in samples])
            padded = torch.cat([rewards[prompt], torch.full((n, 1), float("nan"), dtype=torch.float64)])[samples]
            batch = make_batch(case, prompt, samples[rank])
            trajectories.append(schedule.rollout(batch, lambda b, _, padded=padded: padded[rank : rank + 1]))
            if getattr(schedule, "folds", False):
                schedule.fold_round(padded, has_sample)
            worth.append(torch.cat([values[prompt], values.new_zeros(n)])[samples])
            own.append(worth[-1][rank : rank + 1])
        rounds = {"rounds": torch.stack(worth)} if isinstance(schedule, Late) else {}
        rows += schedule.update(trajectories, own, scale, **rounds).num_rows
    if reducer is not None and not isinstance(schedule, Late):
        reducer.finish()
        reducer.settle(torch.ones(1, n))
    if reducer is not None:
        reducer.deliver()
    return rows


def refusals() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    transformer = tiny.flux_transformer(single_layers=2)
    assert [type(block).__name__ for block in blocks_of(transformer)] == [
        "FluxTransformerBlock", "FluxSingleTransformerBlock", "FluxSingleTransformerBlock"]  # fmt: skip
    assert len(blocks_of(tiny.wan_transformer(layers=2))) == 2
    with pytest.raises(ValueError, match="shard over a mesh of one dimension"):
        shard_transformer(transformer, mesh)
    with pytest.raises(ValueError, match=r"trains in torch.bfloat16.*compute in 16 bits by compute_dtype"):
        shard_transformer(transformer.bfloat16(), mesh["shard"])
