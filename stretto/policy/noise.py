"""Every random draw, keyed by what it is for.

A draw depends on (seed, iteration, prompt group, sample, step) and on nothing else: not on how many samples,
batches or ranks there are, nor on what was drawn before. The hazard is a key that names a rank or a text; a prompt
group is an index. Draws are made on the CPU, so that they do not depend on the device either.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["KeyedNoise", "Noise", "SampleKey", "fingerprint", "generator"]


_WORDS, _FIRST = 624, 3
"""The twister's 624 words, 8 bytes each, begin at the state's fourth; seeded with 0 they begin 0, 1."""


class SampleKey(NamedTuple):
    """One sample of one rollout: iteration, prompt group in it, sample in that group."""

    iteration: int
    prompt: int
    sample: int


class Noise(Protocol):
    """Where a rollout gets its noise from."""

    def initial(self, samples: Sequence[SampleKey]) -> Tensor:
        """The latents at sigma 1, (B, *latent_shape) float32 on the CPU."""

    def step(self, samples: Sequence[SampleKey], step: int) -> Tensor:
        """The noise of transition `step`, (B, *latent_shape) float32 on the CPU."""


def generator(seed: int, stream: str, *key: int) -> torch.Generator:
    """A CPU generator that depends on the seed, the stream's name and the key alone.

    torch seeds its Mersenne twister by 32 bits, too few: among a few hundred thousand draws some would be equal. So
    the twister's whole state comes from a hash of the key.
    """
    name = stream.encode() + struct.pack(f"<{len(key) + 1}q", seed, *key)
    words = torch.frombuffer(bytearray(hashlib.shake_128(name).digest(4 * _WORDS)), dtype=torch.int32)
    random = torch.Generator().manual_seed(0)
    state = random.get_state()
    twister = state.view(torch.int64)[_FIRST : _FIRST + _WORDS]
    assert (int(twister[0]), int(twister[1])) == (0, 1), "torch's generator state has another layout"
    twister.copy_(words.long() & 0xFFFFFFFF)
    return random.set_state(state)


class KeyedNoise:
    """Gaussian noise keyed by sample and step; the initial noise per sample or shared by a prompt group."""

    def __init__(
        self, seed: int, latent_shape: Sequence[int], initial: Literal["sample", "group"] = "sample"
    ) -> None:
        self.seed, self.latent_shape, self.per_group = seed, tuple(latent_shape), initial == "group"

    def initial(self, samples: Sequence[SampleKey]) -> Tensor:
        """See `Noise`; with `initial="group"` all samples of a prompt group get the same row."""
        return torch.stack(
            [
                self._draw("initial_noise", key.iteration, key.prompt, -1 if self.per_group else key.sample)
                for key in samples
            ]
        )

    def step(self, samples: Sequence[SampleKey], step: int) -> Tensor:
        """See `Noise`; always per sample."""
        return torch.stack([self._draw("step_noise", *key, step) for key in samples])

    def _draw(self, stream: str, *key: int) -> Tensor:
        return torch.randn(self.latent_shape, generator=generator(self.seed, stream, *key))


def fingerprint(tensor: Tensor) -> int:
    """32 bits that name a tensor's exact float32 values: equal noise has equal fingerprints on every rank.

    A sum of the values' bits times odd numbers, modulo 2^64, so that it costs one pass and needs no copy to bytes.
    """
    bits = tensor.detach().to("cpu", torch.float32).contiguous().view(torch.int32).flatten().long()
    index = torch.arange(bits.numel())
    total = int(((bits + 0x9E3779B9) * (index * 0x85EBCA6B + 1)).sum())
    return (total ^ (total >> 32)) & 0xFFFFFFFF
