"""A nested state in one safetensors file: tensors as they are, plain data in its header.

A state is dicts, lists and tuples of tensors, numbers, strings, booleans and None, however deep; dict keys
are strings or integers. It comes back equal, bit for bit and type for type. Nothing is pickled, so nothing
can be run by reading. The hazard is aliasing: two names of one tensor come back as two tensors. Source: the
safetensors format (8 bytes of header length, a JSON header, the bytes); any safetensors reader opens the
tensors.
"""

import json
from typing import Any, Protocol, cast

import torch
from torch import Tensor

__all__ = ["read_state", "write_state"]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPE_OF = {name: dtype for dtype, name in _DTYPES.items()}


class _Sink(Protocol):
    def write(self, data: Any, /) -> Any: ...


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def readinto(self, buffer: Any, /) -> int | None: ...


def write_state(file: _Sink, state: dict[str, Any]) -> None:
    """Write a state; tensors of any device, one at a time in host memory. Raises TypeError for other data."""
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "", tensors)
    # safetensors wants the offsets without holes and aligned: wide dtypes first.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "stretto.state.1", "tree": json.dumps(tree)}}
    offset = 0
    for name, tensor in ordered:
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
    for _, tensor in ordered:
        file.write(_bytes_of(tensor.detach().cpu().contiguous()))


def read_state(file: _Source) -> dict[str, Any]:
    """The state that `write_state` wrote, tensors on the CPU. The file must be whole (see `checkpoint`)."""
    header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    tree = json.loads(header.pop("__metadata__")["tree"])
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        tensor = torch.empty(entry["shape"], dtype=_DTYPE_OF[entry["dtype"]])
        read = file.readinto(_bytes_of(tensor)) if tensor.numel() else 0
        if read != tensor.numel() * tensor.element_size():
            raise EOFError(f"{name}: {read} bytes, {tensor.numel() * tensor.element_size()} expected")
        tensors[name] = tensor
    state = _decode(tree, tensors)
    assert isinstance(state, dict)
    return state


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, shared."""
    return cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()).data if tensor.numel() else memoryview(b"")


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON that tells tensors, tuples and dicts apart; scalars and lists stand for themselves."""
    if isinstance(value, Tensor):
        if value.dtype not in _DTYPES:
            raise TypeError(f"{name}: a tensor of {value.dtype} has no place in a checkpoint")
        name = _unused(name, tensors)
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, dict):
        prefix = f"{name}/" if name else ""
        pairs = [[_key(key, name), _encode(inner, f"{prefix}{key}", tensors)] for key, inner in value.items()]
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [_encode(inner, f"{name}/{index}", tensors) for index, inner in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"{name}: a {type(value).__name__} has no place in a checkpoint; make it plain data or a tensor")


def _unused(name: str, tensors: dict[str, Tensor]) -> str:
    """The name, or one like it: {1: t} and {"1": t} ask for the same, and the format keeps one for itself."""
    while name in tensors or name in ("", "__metadata__"):
        name += "'"
    return name


def _key(key: Any, name: str) -> str | int:
    if type(key) in (str, int):
        return key
    raise TypeError(f"{name}: the key {key!r} is neither a string nor an integer")


def _decode(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    return {key: _decode(item, tensors) for key, item in content}
