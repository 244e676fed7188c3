"""The demo's judge: three figures on a set of drawn digits, by means that the reward never saw.

accuracy: share of pictures in which a support vector machine (scikit-learn's SVC, RBF kernel, C = 10,
    gamma = 1 / (64 * variance)) on the 64 raw pixels reads the prompted digit. Fitted on load on the 898 real
    digits of odd index; the reward's classifier, a convolutional net, saw those of even index alone.
frechet: squared Frechet distance |m - m'|^2 + tr(S + S' - 2 (S S')^(1/2)) of Gaussians (Heusel et al., arXiv
    1706.08500) to the same 898 digits, in 13 features in units of a pixel's full range: the first 12
    principal coordinates of the real digits, and the norm of all that these leave out. The last one is what
    sees a pattern that no real digit has: it lies outside the principal directions. 13 features, so that 200
    pictures are enough.
spread: standard deviation within a class: pictures are sorted by the digit the judge reads in them (not the
    one asked for), the unbiased variance of each pixel is averaged over the 64 pixels, its root is averaged
    over the digits that were read at least twice. It falls when a policy draws one picture again and again.

The hazard of a Frechet distance is that it falls with the number of pictures: compare equal numbers.
`real_digits` gives the real pictures to set beside: those of even index, which the judge has not seen.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.svm import SVC
from torch import Tensor

__all__ = ["MIN_PICTURES", "NUM_PRINCIPAL", "digits_judge", "real_digits"]

NUM_PRINCIPAL = 12
MIN_PICTURES = 26


class _Judge(NamedTuple):
    reader: Any
    center: np.ndarray
    principal: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray


def real_digits(half: int) -> tuple[Tensor, list[str]]:
    """Scikit-learn's bundled 8 x 8 digits of even (half 0, 899) or odd index (half 1, 898).

    Returns:
        Pictures (N, 1, 8, 8) float32 in [0, 1], and the N digits as prompts.
    """
    data = load_digits()
    pictures = torch.tensor(data.images[half::2], dtype=torch.float32)[:, None] / 16
    return pictures, [str(label) for label in data.target[half::2]]


def digits_judge(media: Tensor, prompts: list[str]) -> dict[str, float]:
    """Accuracy, frechet and spread of drawn digits, as the module defines them.

    Args:
        media: (B, 1, 8, 8) in [0, 1], any device; at least 26 pictures, 200 for a frechet that means
        something. prompts: B prompts, each a digit "0" to "9".

    Returns:
        {"accuracy": share, "frechet": squared pixel units, "spread": pixel units}.

    Raises:
        ValueError: pictures of another shape, or too few of them, or not one prompt a picture.
    """
    if media.ndim != 4 or tuple(media.shape[1:]) != (1, 8, 8):
        raise ValueError(f"the judge `digits` needs pictures of shape (B, 1, 8, 8), not {tuple(media.shape)}")
    if len(media) < MIN_PICTURES or len(media) != len(prompts):
        raise ValueError(
            f"the judge `digits` got {len(media)} pictures and {len(prompts)} prompts; "
            f"it needs one prompt a picture and at least {MIN_PICTURES} pictures"
        )
    judge = _judge()
    pixels = media.detach().cpu().double().flatten(1).numpy()
    read = judge.reader.predict(pixels)
    features = _features(pixels, judge.center, judge.principal)
    return {
        "accuracy": float(np.mean(read == np.array(prompts))),
        "frechet": _frechet(features.mean(0), np.cov(features.T), judge.mean, judge.covariance),
        "spread": _spread(pixels, read),
    }


@functools.cache
def _judge() -> _Judge:
    """Fitted once a process, in well under a second."""
    pictures, labels = real_digits(1)
    pixels = pictures.double().flatten(1).numpy()
    center = pixels.mean(0)
    principal = np.linalg.eigh(np.cov(pixels.T))[1][:, ::-1][:, :NUM_PRINCIPAL]
    features = _features(pixels, center, principal)
    reader = SVC(kernel="rbf", C=10.0, gamma="scale").fit(pixels, np.array(labels))
    return _Judge(reader, center, principal, features.mean(0), np.cov(features.T))


def _features(pixels: np.ndarray, center: np.ndarray, principal: np.ndarray) -> np.ndarray:
    """Pixels (N, 64) to features (N, 13): principal coordinates, and the norm of what they leave out."""
    centered = pixels - center
    coordinates = centered @ principal
    left_out = np.linalg.norm(centered - coordinates @ principal.T, axis=1, keepdims=True)
    return np.concatenate([coordinates, left_out], axis=1)


def _frechet(mean: np.ndarray, covariance: np.ndarray, mean_real: np.ndarray, covariance_real: np.ndarray) -> float:
    values, vectors = np.linalg.eigh(covariance_real)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ covariance @ root), 0)).sum()
    shift = np.square(mean - mean_real).sum()
    return float(shift + np.trace(covariance) + np.trace(covariance_real) - 2 * cross)


def _spread(pixels: np.ndarray, read: np.ndarray) -> float:
    groups = [pixels[read == digit] for digit in np.unique(read)]
    spreads = [np.sqrt(group.var(0, ddof=1).mean()) for group in groups if len(group) > 1]
    return float(np.mean(spreads)) if spreads else 0.0
