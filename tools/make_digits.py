"""Makes the two shipped files of the digits demo from scikit-learn's bundled 8 x 8 digits.

    python tools/make_digits.py [base|classifier|all] [--steps 3000] [--base FILE] [--classifier FILE]

The base learns flow matching on all 1,797 images with half of the labels random, drawn afresh at every step,
so the right digit is the likeliest one and no more than that; a tenth see no label, for classifier-free
guidance. The classifier sees the images of even index alone: the judge is fitted on the odd ones. Hazard:
bitwise repeatable for the same torch, machine and number of threads only; elsewhere the files differ by
rounding, grown over thousands of steps.
"""

import argparse
import copy
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional

from stretto.models import digits as model
from stretto.rewards import digits as reward

RANDOM_LABELS = 0.5
NO_LABELS = 0.1
EMA_DECAY = 0.999


def real_digits() -> tuple[Tensor, Tensor]:
    """Images (1797, 1, 8, 8) in [0, 1] and labels (1797,)."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 100 steps, then a cosine to 0."""
    return peak * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))


def make_base(steps: int, batch: int, seed: int) -> dict[str, Tensor]:
    """Trains the flow model; the EMA weights and the frozen embeddings of the prompts."""
    torch.manual_seed(seed)
    images, labels = real_digits()
    latents = model.pack(images)
    condition = {"prompt_embeds": torch.randn(11, 2, 32), "pooled_prompt_embeds": torch.randn(11, 32)}
    transformer = model.build_transformer().train()
    average = copy.deepcopy(transformer).requires_grad_(False)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=0.0, weight_decay=0.01, betas=(0.9, 0.99))
    started, mean_loss = time.monotonic(), 1.0
    for step in range(steps):
        rows = torch.randint(len(latents), (batch,))
        shown = shown_labels(labels[rows])
        loss = flow_matching_loss(transformer, latents[rows], {k: v[shown] for k, v in condition.items()})
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, 2e-3)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        decay = min((1 + step) / (10 + step), EMA_DECAY)
        torch._foreach_lerp_(list(average.parameters()), list(transformer.parameters()), 1 - decay)
        mean_loss += 0.01 * (loss.item() - mean_loss)
        if step % 200 == 199:
            print(f"step {step + 1}: loss {mean_loss:.4f}, {time.monotonic() - started:.0f} s", flush=True)
    tensors = {name: value.contiguous() for name, value in average.state_dict().items()}
    return tensors | {model.CONDITION_PREFIX + name: value for name, value in condition.items()}


def shown_labels(labels: Tensor) -> Tensor:
    """What the model is told, (B,): a tenth nothing (row 10), of the rest half a random digit."""
    told = torch.where(torch.rand(len(labels)) < RANDOM_LABELS, torch.randint_like(labels, 10), labels)
    return told.masked_fill(torch.rand(len(labels)) < NO_LABELS, 10)


def flow_matching_loss(transformer: torch.nn.Module, clean: Tensor, condition: dict[str, Tensor]) -> Tensor:
    """Mean squared error of the velocity noise - clean at a uniform noise level; clean is (B, 16, 4)."""
    sigma = torch.rand(len(clean))
    noise = torch.randn_like(clean)
    mixed = torch.lerp(clean, noise, sigma[:, None, None])
    predicted = transformer(
        hidden_states=mixed,
        timestep=sigma,
        encoder_hidden_states=condition["prompt_embeds"],
        pooled_projections=condition["pooled_prompt_embeds"],
        img_ids=model.image_ids(),
        txt_ids=torch.zeros(2, 3),
        return_dict=False,
    )[0]
    return functional.mse_loss(predicted, noise - clean)


def make_classifier(steps: int, seed: int) -> dict[str, Tensor]:
    """Trains the reward's classifier on the images of even index, with pixel noise."""
    torch.manual_seed(seed)
    images, labels = real_digits()
    seen, held_out = slice(0, None, 2), slice(1, None, 2)
    classifier = reward.build_classifier()
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=0.0, weight_decay=0.05)
    for step in range(steps):
        rows = torch.randint(len(images[seen]), (128,))
        picture = images[seen][rows]
        picture = (picture + 0.15 * torch.rand(128, 1, 1, 1) * torch.randn_like(picture)).clamp(0, 1)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, 3e-3)
        optimizer.zero_grad()
        functional.cross_entropy(classifier(picture), labels[seen][rows]).backward()
        optimizer.step()
    with torch.no_grad():
        right = classifier(images[held_out]).argmax(1) == labels[held_out]
    print(f"classifier: accuracy on the half it has not seen {right.float().mean():.4f}")
    return {name: value.contiguous() for name, value in classifier.state_dict().items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["base", "classifier", "all"], default="all")
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps of the base")
    parser.add_argument("--batch", type=int, default=128, help="images in one step of the base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--base", type=Path, default=model.BASE)
    parser.add_argument("--classifier", type=Path, default=reward.CLASSIFIER)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.what in ("classifier", "all"):
        save_file(make_classifier(1500, args.seed), args.classifier)
    if args.what in ("base", "all"):
        save_file(make_base(args.steps, args.batch, args.seed), args.base)


if __name__ == "__main__":
    main()
