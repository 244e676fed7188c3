"""The demo's reward: how sure a small classifier is that the picture shows the digit that was asked for.

The classifier is a convolutional net of 10 k weights, shipped, trained by `tools/make_digits.py` on the
images of even index of scikit-learn's digits. Its hazard is that of every learned reward: it can be pleased
by pictures that are not digits (a policy without KL puts a pattern behind every one), so
`stretto.rewards.digits_judge`, of another kind and fitted on the other half, has the last word.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["CLASSIFIER", "FLOOR", "build_classifier", "digits"]

CLASSIFIER = Path(__file__).with_name("digits_classifier.safetensors")
FLOOR = -10.0


def build_classifier() -> nn.Sequential:
    """A freshly initialised classifier: pictures (B, 1, 8, 8) in [0, 1] to logits (B, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


@functools.cache
def _classifier() -> nn.Sequential:
    """The shipped classifier on the CPU, loaded once a process; torch's own random state is not moved."""
    with torch.random.fork_rng(devices=[]):
        classifier = build_classifier()
    classifier.load_state_dict(load_file(CLASSIFIER))
    return classifier.eval().requires_grad_(False)


@torch.no_grad()
def digits(media: Tensor, prompts: list[str], **metadata: Any) -> Tensor:
    """Log-probability of the prompted digit, clamped to [-10, 0].

    Args:
        media: (B, 1, 8, 8) in [0, 1]; moved to the CPU, float32.
        prompts: B prompts, each a digit "0" to "9".
        metadata: not used.

    Returns:
        (B,) float32 on the CPU, without gradient.

    Raises:
        ValueError: media of another shape, or a prompt that is not a digit.
    """
    if media.ndim != 4 or tuple(media.shape[1:]) != (1, 8, 8):
        raise ValueError(f"the reward `digits` needs pictures of shape (B, 1, 8, 8), not {tuple(media.shape)}")
    for prompt in prompts:
        if len(prompt) != 1 or prompt not in "0123456789":
            raise ValueError(f'the reward `digits` needs prompts "0" to "9", not {prompt!r}')
    labels = torch.tensor([int(prompt) for prompt in prompts])
    log_probs = _classifier()(media.detach().cpu().float()).log_softmax(1)
    return log_probs.gather(1, labels[:, None])[:, 0].clamp(min=FLOOR)
