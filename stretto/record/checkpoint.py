"""Checkpoints that are whole or not there, of one process or of many ranks in one format.

A checkpoint is a folder `iteration-00000020` with torch.distributed.checkpoint's files and, written last by rank 0,
`manifest.json`: the size and SHA-256 of every file, the iteration, the model's identity, whether it was the best so
far, and all state that is no tensor. It is made under a hidden name, flushed, and renamed: a kill at any moment
leaves the one before it. The hazards: a file cut short later (found by the manifest, named, and the checkpoint before
it taken), a full disk (nothing half-written stays), a checkpoint of another model (refused), and `.metadata`, which
is a pickle (see `sharded_files`: take checkpoints only from whom you would take a program). Source: PyTorch's
distributed checkpoint, its format and its resharding.
"""

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from stretto.record.atomic import naming, write_atomic
from stretto.record.checkpoint_folder import best, forget, newest, partial_of, path_of, remove, take_name, tidy
from stretto.record.manifest import FORMAT, MANIFEST, as_json, plain_json
from stretto.record.sharded_files import ShardedWriter
from stretto.record.whole_checkpoint import Checkpoint, newest_whole, rank_of, read_tensors, size_of, whole

__all__ = ["Checkpoint", "Checkpoints", "best", "newest", "newest_whole", "read_tensors", "whole"]


class Checkpoints:
    """The checkpoints of a run: saved and loaded by all ranks of `group` together.

    folder: on a disk that all ranks share. identity: plain data that names the model (adapter, shapes, method, ...);
    loading compares it. keep: newest checkpoints that stay; the last one saved with `is_best` stays beside them.
    asynchronous: files are written behind what comes next. group: a gloo group of its own, on which nothing else
    communicates (a save in the background would meet it), whose timeout is longer than a save takes; None: this
    process alone.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        *,
        keep: int = 2,
        asynchronous: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder, self.identity = folder, plain_json(identity)
        self.keep, self.asynchronous, self.group = keep, asynchronous, group
        self._pending: tuple[Path, Future[Any]] | None = None

    def save(
        self, iteration: int, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], *, is_best: bool = False
    ) -> None:
        """Write the checkpoint after `iteration` finished iterations, then let the oldest go.

        tensors: by the same names on every rank; DTensors are saved by shards, others by one rank. plain: rank 0's is
        kept, as JSON. All ranks call this; it waits for the save before it. Asynchronous: returns when the tensors
        are copied to host memory, and an error comes at the next `save` or `wait`. Raises on every rank: OSError that
        names the path (a full disk), with the older checkpoints untouched; TypeError for plain state that is not.
        """
        self.wait()
        final = path_of(self.folder, iteration)
        manifest = {
            "format": FORMAT,
            "iteration": iteration,
            "identity": self.identity,
            "is_best": is_best,
            "world_size": size_of(self.group),
            "plain": plain_json(plain),
        }
        writer = ShardedWriter(
            partial_of(final), partial(self._begin, final), partial(self._complete, final, manifest)
        )
        ranks: dict[str, Any] = {"process_group": self.group, "no_dist": self.group is None}
        if self.asynchronous:
            pending = dcp.async_save(dict(tensors), storage_writer=writer, **ranks)
            assert isinstance(pending, Future)
            self._pending = (final, pending)
            return
        try:
            dcp.save(dict(tensors), storage_writer=writer, **ranks)
        except CheckpointException as error:
            raise self._failure(final, error) from error

    def wait(self) -> None:
        """Return when no save is on its way; all ranks' returns mean that the checkpoint is complete.

        Raises what went wrong with it, on every rank.
        """
        if self._pending is None:
            return
        final, pending = self._pending
        error = pending.exception()
        self._pending = None
        if isinstance(error, CheckpointException):
            raise self._failure(final, error) from error
        if error is not None:  # a rank is gone, or slower than the group's timeout
            raise RuntimeError(f"{final}: not saved: {_one_line(error)}") from error

    def close(self) -> None:
        """`wait`: nothing else is held."""
        self.wait()

    def newest_whole(self) -> Checkpoint | None:
        """The newest whole checkpoint, the same on all ranks, and none of its tensors; see the function."""
        self.wait()
        return newest_whole(self.folder, self.identity, group=self.group)

    def load(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> list[str]:
        """Fill `tensors` from a checkpoint, in place and bit for bit; all ranks call this with the same names.

        They may be split otherwise, or over another number of ranks, than those that were saved. Returns the names
        that the checkpoint does not hold; their tensors stay as they are. Raises ValueError where a shape or dtype
        differs.
        """
        wanted = {name: tensor.detach() for name, tensor in tensors.items() if name in checkpoint.tensors}
        for name, tensor in wanted.items():
            there = checkpoint.tensors[name]
            here = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            if here != there:
                raise ValueError(
                    f"{checkpoint.path} is a checkpoint of another model: {name} is {there['dtype']} "
                    f"{tuple(there['shape'])} there and {here['dtype']} {tuple(here['shape'])} here"
                )
        if wanted:
            reader = dcp.FileSystemReader(checkpoint.path)
            try:
                dcp.load(wanted, storage_reader=reader, process_group=self.group, no_dist=self.group is None)
            except CheckpointException as error:
                raise _first(checkpoint.path, "read", error) from error
        return [name for name in tensors if name not in checkpoint.tensors]

    def load_newest(self, tensors: Mapping[str, Tensor]) -> Checkpoint | None:
        """Fill `tensors` from the newest whole checkpoint; None where there is none at all."""
        checkpoint = self.newest_whole()
        if checkpoint is not None:
            self.load(checkpoint, tensors)
        return checkpoint

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        with contextlib.suppress(*[Exception] if error else []):  # what failed first is told
            self.close()

    def _begin(self, final: Path) -> None:
        with naming(final):
            self.folder.mkdir(parents=True, exist_ok=True)
            tidy(self.folder)
            partial_of(final).mkdir()

    def _complete(
        self, final: Path, manifest: dict[str, Any], files: dict[str, Any], tensors: dict[str, Any]
    ) -> None:
        with naming(final):
            text = as_json(manifest | {"files": files, "tensors": tensors})
            write_atomic(partial_of(final) / MANIFEST, text)
            take_name(final)
            forget(self.folder, manifest["iteration"], self.keep)

    def _failure(self, final: Path, error: CheckpointException) -> BaseException:
        """What to raise; nothing half-written stays."""
        if rank_of(self.group) == 0:
            remove(partial_of(final))
        return _first(final, "save", error)


def _first(path: Path, verb: str, error: CheckpointException) -> BaseException:
    """The error of the first rank that failed, in one line that names the checkpoint."""
    rank, (first, _) = min(error.failures.items())
    if isinstance(first, KeyboardInterrupt):
        return first
    if isinstance(first, FileNotFoundError) and rank:
        return ValueError(f"{path}: rank {rank} does not see it; take a run.folder on a disk that all ranks share")
    if isinstance(first, OSError) and first.errno is not None:
        return OSError(first.errno, first.strerror, str(path))
    return RuntimeError(f"{path}: rank {rank} could not {verb} it: {_one_line(first)}")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
