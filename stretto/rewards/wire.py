"""What a remote reward is sent: one safetensors blob a batch. Nothing is pickled, so nothing can be run by reading.

    tensor "media"          (B, C, H, W), or (B, F, C, H, W) for video: float32 in [0, 1], or uint8 in 0..255
    metadata "format"       "stretto.reward.1"
    metadata "prompts"      JSON: B texts
    metadata "columns"      JSON: an object of further keyword arguments, such as a prompt file's other columns

and the answer is JSON: `{"rewards": [...]}`, B finite numbers in the order of the samples, or `{"error": "...",
"row": r}` (row may be null) beside a status of 4xx. The hazard is uint8: a quarter of the bytes, and a reward that
sees pictures as a file would keep them, rounded to 1/255.
"""

import json
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

__all__ = ["FORMAT", "Request", "pack", "unpack"]

FORMAT = "stretto.reward.1"


class Request(NamedTuple):
    """What is asked: B media, B prompts, and further keyword arguments."""

    media: Tensor
    prompts: list[str]
    columns: dict[str, Any]


def pack(media: Tensor, prompts: list[str], columns: dict[str, Any], *, as_uint8: bool = False) -> bytes:
    """The body of a request; equal requests have equal bytes.

    media of any device: uint8 as it is; other dtypes as float32, or with `as_uint8` clamped to [0, 1] and rounded to
    0..255. Raises ValueError for columns that are not JSON (a NaN is none).
    """
    media = media.detach().cpu()
    if media.dtype != torch.uint8:
        media = media.float()
        if as_uint8:
            media = media.clamp(0, 1).mul(255).round().to(torch.uint8)
    try:
        texts = {"prompts": json.dumps(prompts), "columns": json.dumps(columns, allow_nan=False)}
    except (TypeError, ValueError) as error:
        raise ValueError(f"its metadata cannot be sent as JSON: {error}") from None
    data = media.contiguous().numpy().tobytes()
    # By hand: the library writes its metadata in an order of its own, anew each time, and no two bodies are equal.
    dtype = "U8" if media.dtype == torch.uint8 else "F32"
    entry = {"dtype": dtype, "shape": list(media.shape), "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": {"format": FORMAT, **texts}, "media": entry}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def unpack(body: bytes) -> Request:
    """What `pack` packed: media exactly as sent, in its dtype. Raises ValueError, one line, for any other bytes."""
    try:
        tensors = load_tensors(body)
        texts = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")]).get("__metadata__") or {}
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"not a safetensors blob: {' '.join(str(error).split())}") from None
    if texts.get("format") != FORMAT or set(tensors) != {"media"}:
        raise ValueError(
            f'not a {FORMAT} request: it holds one tensor, "media", and names the format in its metadata'
        )
    media = tensors["media"]
    if media.dtype not in (torch.float32, torch.uint8) or media.ndim not in (4, 5):
        raise ValueError(f"media are {media.dtype} of shape {tuple(media.shape)}; 4 or 5 dims of float32 or uint8 go")
    try:
        prompts, columns = json.loads(texts["prompts"]), json.loads(texts["columns"])
    except (KeyError, ValueError, RecursionError):
        raise ValueError("prompts and columns are JSON in the metadata") from None
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts are a JSON list of texts")
    if len(prompts) != len(media) or not isinstance(columns, dict):
        raise ValueError(f"{len(media)} media need as many prompts (there are {len(prompts)}), and columns an object")
    return Request(media, prompts, columns)
