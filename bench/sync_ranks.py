"""One cell of `bench.sync`, in a rank: every way of training once a repeat, in an order that rotates.

The model is a row of blocks that sleep for as long as a real one's forward and backward take and whose gradients are
real: the library's own schedules make them and its own reducer sends them. An iteration begins when the parameters
of the one before are published and ends with the optimizer's step. The hazard is a way that computes something else:
in the first iteration, which is not counted, all must make the same gradient.
"""

import gc
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from bench.link import start_together
from bench.sleeping import pace, wake_in_time
from stretto.overlap import GradientReducer
from stretto.policy import AdvantageRule, Batch, KeyedNoise, Objective, Policy, Process, SampleKey, make_sigmas
from stretto.policy.schedules import Late, Native, Reweight

__all__ = ["WAYS", "Problem", "Way", "cell", "reduction_alone"]

CHANNELS, WORK = 64, 192
STEPWISE = ("all-reduce", "all-reduce during backward", "reduce", "reduce during backward")
RULE = AdvantageRule()


@dataclass(frozen=True)
class Problem:
    """forward_s: without gradient; traced_s: with; elements: of the gradient; products: of a computing reward."""

    forward_s: float
    traced_s: float
    backward_s: float
    reward_s: float
    elements: int
    products: int
    num_blocks: int = 6
    num_steps: int = 10
    rounds: int = 1


@dataclass(frozen=True)
class Way:
    """schedule: native, reweight or late. reduction: see `STEPWISE`; or once an iteration, coalesced or late."""

    label: str
    schedule: str
    reduction: str
    computes: bool = False

    @property
    def is_per_step(self):
        return self.reduction in STEPWISE

    @property
    def leaves_early(self):
        return self.reduction.endswith("during backward")

    @property
    def shards(self):
        return not self.reduction.startswith("all-reduce")


WAYS = (
    Way("native, per step, all-reduced", "native", STEPWISE[0]),
    Way("native, per step, all-reduced during backward", "native", STEPWISE[1]),
    Way("native, per step", "native", STEPWISE[2]),
    Way("native, per step, during backward", "native", STEPWISE[3]),
    Way("native, coalesced", "native", "coalesced"),
    Way("reweight, coalesced", "reweight", "coalesced"),
    Way("reweight, late", "late", "late"),
    Way("reweight, coalesced, computing reward", "reweight", "coalesced", computes=True),
    Way("reweight, late, computing reward", "late", "late", computes=True),
)


def cell(problem, labels, repeats):
    """Of each way, a list over repeats of this rank's seconds; see `Trainer.iteration`."""
    wake_in_time()
    trainers = [Trainer(Problem(**problem), way) for way in WAYS if way.label in labels]
    _check(trainers)
    found = {trainer.way.label: [] for trainer in trainers}
    gc.collect()
    gc.disable()
    try:
        for repeat in range(repeats):
            turn = repeat % len(trainers)
            for trainer in [*trainers[turn:], *trainers[:turn]]:
                found[trainer.way.label].append(trainer.iteration(repeat + 1))
    finally:
        gc.enable()
    for trainer in trainers:
        trainer.close()
    return found


def reduction_alone(problem, repeats):
    """Seconds of one coalesced reduction in each repeat, nothing beside it."""
    trainer = Trainer(Problem(**problem), Way("reduction", "reweight", "coalesced"))
    seconds = []
    for _ in range(repeats + 1):
        for parameter in trainer.policy.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        start = start_together()
        trainer.reducer.finish()
        seconds.append(time.monotonic() - start)
    trainer.close()
    return seconds[1:]


class Trainer:
    """A model, its schedule, its reduction and its optimizer, on this rank."""

    def __init__(self, problem, way):
        self.problem, self.way = problem, way
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        module = nn.Sequential(*(Block(problem) for _ in range(problem.num_blocks)))
        self.policy = Policy(
            velocity=lambda latents, sigma, condition: module(latents),
            parameters=dict(module.named_parameters()),
            process=Process(make_sigmas("shifted", problem.num_steps, shift=3.0), "flow_sde", 0.7),
            objective=Objective(),
            noise=KeyedNoise(0, (1, CHANNELS)),
            module=module,
            in_lockstep=way.is_per_step,
        )
        self.group = dist.new_group()
        self.reducer = GradientReducer(
            module,
            self.group,
            bucket_bytes=1,  # one bucket a block
            sharded=way.shards,
            late_bound=way.reduction == "late",
            average=False,
        )
        self.stepped = self.reducer.owned or list(module.parameters())
        self.optimizer = torch.optim.AdamW(self.stepped, lr=1e-5)
        if way.schedule == "late":
            self.schedule = Late(self.policy, self.reducer, RULE, self.world_size * problem.rounds)
        else:
            self.schedule = {"native": Native, "reweight": Reweight}[way.schedule](self.policy)
        self.gathered_s = 0.0

    def iteration(self, number):
        """Seconds: the whole, blocked for gradients, blocked for published parameters, gathering the rewards."""
        start = start_together()
        self.reducer.exposed_s, self.gathered_s = 0.0, 0.0
        if self.reducer.owned:
            self.reducer.publish()
        trajectories, rewards, published_s = [], [], 0.0
        for place in range(self.problem.rounds):
            key = SampleKey(number, 0, place * self.world_size + self.rank)
            batch = Batch((key,), {}, tuple(range(self.problem.num_steps)))
            with self.reducer.accumulate() if self.way.reduction == "coalesced" else nullcontext():
                trajectories.append(self.schedule.rollout(batch, self.score))
            if place == 0:
                published_s = self.reducer.exposed_s
            rewards.append(self.gather(trajectories[-1].rewards))
            if self.way.schedule == "late" and self.schedule.folds:
                self.schedule.fold_round(rewards[-1], torch.ones(self.world_size, dtype=torch.bool))
        rounds = RULE(torch.cat(rewards).unsqueeze(0)).values.view(-1, self.world_size)
        self.reduce(trajectories, rounds)
        self.optimizer.step()
        end = time.monotonic() - start
        blocked_s = self.reducer.exposed_s - published_s
        return {"step": end, "blocked": blocked_s, "published": published_s, "gathered": self.gathered_s}

    def reduce(self, trajectories, rounds):
        """Leave the gradient of all ranks' samples in what the optimizer steps."""
        scale = 1 / (rounds.numel() * self.problem.num_steps)
        own = list(rounds[:, self.rank : self.rank + 1])
        self.optimizer.zero_grad()
        if self.way.is_per_step:
            self._per_step(trajectories, own, scale)
        elif self.way.reduction == "coalesced":
            with self.reducer.accumulate():
                self.schedule.update(trajectories, own, scale)
            self.reducer.finish()
        else:
            self.schedule.update(trajectories, own, scale, rounds)
            self.reducer.deliver()

    def _per_step(self, trajectories, own, scale):
        totals = [torch.zeros_like(p) for p in self.stepped]
        for trajectory, values in zip(trajectories, own):
            for step in trajectory.steps:
                with nullcontext() if self.way.leaves_early else self.reducer.accumulate():
                    self.schedule.update([replace(trajectory, steps=[step])], [values], scale)
                self.reducer.finish()
                for total, parameter in zip(totals, self.stepped):
                    total += parameter.grad
                    parameter.grad = None
        for total, parameter in zip(totals, self.stepped):
            parameter.grad = total

    def score(self, batch, latents):
        """Decode and judge: asleep, or as many products as alone take as long."""
        if self.way.computes:
            matrix = torch.ones(WORK, WORK)
            for _ in range(self.problem.products):
                matrix @ matrix
        else:
            pace.sleep_until(time.perf_counter() + self.problem.reward_s)
        return latents.double().mean(dim=(1, 2)).unsqueeze(1)

    def gather(self, rewards):
        start = time.perf_counter()
        everyone = [torch.empty_like(rewards) for _ in range(self.world_size)]
        dist.all_gather(everyone, rewards)
        self.gathered_s += time.perf_counter() - start
        return torch.cat(everyone)

    def gradient(self):
        """The last iteration's, of all blocks from the last to the first, flat, the same on every rank."""
        parts = [parameter.grad.flatten() for parameter in self.stepped]
        if not self.reducer.owned:
            return torch.cat(parts[::-1])
        whole = [[torch.empty_like(part) for _ in range(self.world_size)] for part in parts]
        for everyone, part in zip(whole, parts):
            dist.all_gather(everyone, part)
        return torch.cat([part for everyone in whole for part in everyone])

    def close(self):
        self.reducer.close()
        dist.destroy_process_group(self.group)


class Block(nn.Module):
    """x + sin(x w) / 10, w the mean of many rows of weights, and a sleep before it and before its gradient."""

    def __init__(self, problem):
        super().__init__()
        self.problem = problem
        self.weight = nn.Parameter(torch.randn(problem.elements // problem.num_blocks // CHANNELS // 8 * 8, CHANNELS))

    def forward(self, x):
        problem = self.problem
        forward_s = problem.traced_s if torch.is_grad_enabled() else problem.forward_s
        y = x + torch.sin(x * self.weight.mean(0)) / 10
        return Sleep.apply(y, forward_s / problem.num_blocks, problem.backward_s / problem.num_blocks)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, x, forward_s, backward_s):
        context.backward_s = backward_s
        pace.sleep_until(time.perf_counter() + forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        pace.sleep_until(time.perf_counter() + context.backward_s)
        return gradient, None, None


def _check(trainers):
    """Run each once, and refuse another gradient than the first one's."""
    truth = None
    for trainer in trainers:
        trainer.iteration(0)
        gradient = trainer.gradient()
        truth = gradient if truth is None else truth
        far = float((gradient - truth).norm() / truth.norm())
        assert far < 1e-5, f"{trainer.way.label} made another gradient, {far:.2g} of its size away"
