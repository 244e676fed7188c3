"""Which checkpoint of a folder is whole, the same one for all ranks of a group, and its tensors in one process.

Every file is digested before anything is read from it, a share of them by every rank. The hazard is a rank that would
decide for itself: rank 0's view of the folder counts, and its error is raised everywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from stretto.record.checkpoint_folder import newest
from stretto.record.manifest import Damaged, check_file, compare_identity, plain_json, read_manifest
from stretto.record.sharded_files import read_sharded

__all__ = ["Checkpoint", "newest_whole", "rank_of", "read_tensors", "size_of", "whole"]

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are whole.

    plain: the state that is no tensor. tensors: {name: {"shape", "dtype"}} of those it holds. world_size: ranks that
    saved it. notes: what was wrong with newer ones.
    """

    path: Path
    iteration: int
    plain: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    world_size: int
    notes: list[str] = field(default_factory=list)


def newest_whole(
    folder: Path, identity: Mapping[str, Any] | None = None, *, group: dist.ProcessGroup | None = None
) -> Checkpoint | None:
    """The newest whole checkpoint; None where there is none at all.

    Damaged ones are passed over, each with a note that names what is wrong. group: its ranks share the reading for
    the digests; rank 0's view of the folder and its `identity` count. Raises ValueError, on every rank the same, when
    all are damaged, when one that is newer than all whole ones has a format that this version does not know, and when
    the newest whole one is of another model than `identity`.
    """
    notes: list[str] = []
    for path in _from_rank_0(group, lambda: newest(folder)):
        manifest, damage = _from_rank_0(group, partial(_manifest_of, path))
        damage = damage or _damage(path, manifest["files"], group)
        if damage is None:
            _from_rank_0(group, partial(_compare, path, manifest, identity))
            return _checkpoint(path, manifest, [f"{note}; took {path.name}" for note in notes])
        notes.append(f"{path} is damaged ({damage})")
    if notes:
        raise ValueError(f"no checkpoint is whole: {'; '.join(notes)}; start again in another run.folder")
    return None


def whole(path: Path) -> Checkpoint:
    """This checkpoint. Raises ValueError when it is damaged."""
    manifest, damage = _manifest_of(path)
    damage = damage or _damage(path, manifest["files"], None)
    if damage is not None:
        raise ValueError(f"{path} is damaged ({damage})")
    return _checkpoint(path, manifest, [])


def read_tensors(checkpoint: Checkpoint, prefix: str = "") -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names; whole, on the CPU, in one process."""
    wanted = {name: entry for name, entry in checkpoint.tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): tensor for name, tensor in read_sharded(checkpoint.path, wanted).items()}


def _checkpoint(path: Path, manifest: dict[str, Any], notes: list[str]) -> Checkpoint:
    m = manifest
    return Checkpoint(path, m["iteration"], m["plain"], m["tensors"], m["world_size"], notes)


def _compare(path: Path, manifest: dict[str, Any], identity: Mapping[str, Any] | None) -> None:
    if identity is not None:
        compare_identity(path, manifest["identity"], plain_json(identity))


def _manifest_of(path: Path) -> tuple[dict[str, Any], str | None]:
    """A manifest, or what is wrong with it. Raises ValueError for another format."""
    try:
        return read_manifest(path), None
    except Damaged as damage:
        return {}, str(damage)


def _damage(path: Path, files: dict[str, Any], group: dist.ProcessGroup | None) -> str | None:
    """What is wrong with a checkpoint's files, or None: every rank digests its share of them."""
    mine = sorted(files)[rank_of(group) :: size_of(group)]
    found = [damage for name in mine if (damage := check_file(path / name, files[name]))]
    everywhere = [found]
    if group is not None:
        everywhere = [[] for _ in range(size_of(group))]
        dist.all_gather_object(everywhere, found, group=group)
    return next((damage for share in everywhere for damage in share), None)


def _from_rank_0(group: dist.ProcessGroup | None, function: Callable[[], T]) -> T:
    """The value of `function()` on rank 0, on every rank; or its error."""
    if group is None:
        return function()
    outcome: list[Any] = [None, None]
    if rank_of(group) == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, dist.get_global_rank(group, 0), group=group)
    if outcome[1] is not None:
        raise outcome[1]
    value: T = outcome[0]
    return value


def rank_of(group: dist.ProcessGroup | None) -> int:
    """This process's rank in `group`; None is this process alone."""
    return 0 if group is None else dist.get_rank(group)


def size_of(group: dist.ProcessGroup | None) -> int:
    """The number of ranks of `group`; None is this process alone."""
    return 1 if group is None else dist.get_world_size(group)
