"""The tensors of a checkpoint as torch.distributed.checkpoint's own files, digested while they are written.

Every rank writes the shards that it holds into one file, replicated tensors are written by one of their holders, and
rank 0 writes `.metadata`, which says where every shard lies. So a state saved on 4 ranks can be read on 3, or by any
reader of that format. The hazard: `.metadata` is a pickle, and reading it runs what it says; digests are to be
checked before it is read, and they protect from damage, not from malice. The folder must lie on a disk that all ranks
share.
"""

import hashlib
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.tensor import DTensor
from torch.futures import Future

__all__ = ["ShardedWriter", "read_sharded"]

# One process is no mistake here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class ShardedWriter(dcp.FileSystemWriter):
    """Writes one checkpoint into `folder`: on every rank an object of its own.

    begin: called on rank 0 before any rank writes; makes the folder. complete(files, tensors): called on rank 0 when
    every rank has written and flushed; files: {name: {"bytes", "sha256"}}; tensors: {name: {"shape", "dtype"}}. What
    either raises, all ranks see.
    """

    def __init__(
        self,
        folder: Path,
        begin: Callable[[], None],
        complete: Callable[[dict[str, Any], dict[str, Any]], None],
    ) -> None:
        super().__init__(folder)
        self.fs = self._files = _DigestedFiles()
        self._begin, self._complete = begin, complete

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copies of the tensors in host memory, a DTensor's of its own shard alone."""
        return {name: _staged(tensor) for name, tensor in state_dict.items()}

    def storage_meta(self) -> StorageMeta:
        """Nothing: the stock one would keep the path at which a checkpoint was made."""
        return StorageMeta()

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """The plan as it is: the folder is made by rank 0, after it has cleared away what a kill left."""
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """On rank 0, between planning and writing."""
        self._begin()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[Any]]:
        """Write and flush this rank's file. Raises the OSError of the write that failed (a full disk)."""
        try:
            results = super().write_data(plan, planner).value()
        except Exception:  # torch.save makes a RuntimeError of it on its way out
            if self._files.failure is not None:
                raise self._files.failure from None
            raise
        done: Future[list[Any]] = Future()
        done.set_result(_Written(results, self._files.digests))
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """On rank 0: write `.metadata`, then what `complete` does."""
        files = {name: digest for written in results for name, digest in getattr(written, "files", {}).items()}
        super().finish(metadata, results)
        files[".metadata"] = self._files.digests[".metadata.tmp"]
        tensors = {
            name: {"shape": list(tensor.size), "dtype": str(tensor.properties.dtype).removeprefix("torch.")}
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, dcp.TensorStorageMetadata)
        }
        self._complete(files, tensors)


def read_sharded(folder: Path, tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Whole tensors by name, on the CPU, in one process and with no process group.

    tensors: {name: {"shape", "dtype"}} of those wanted, as a manifest tells them. The files must be known to be
    whole.
    """
    state = {
        name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"])) for name, entry in tensors.items()
    }
    if state:
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def _staged(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):  # from_local would move it back to the mesh's device
        return DTensor(_staged(tensor.to_local()), tensor._spec, requires_grad=False)
    return tensor.detach().to("cpu", copy=True)


class _Written(list[Any]):
    """The results of a rank's writes, with the digests of its files; rank 0 gets it as a pickle."""

    def __init__(self, results: list[Any], files: dict[str, Any]) -> None:
        super().__init__(results)
        self.files = files


class _DigestedFiles(FileSystem):
    """Files that are digested as they are written, so that the digest is of what was meant.

    failure: the first OSError of a write.
    """

    def __init__(self) -> None:
        self.digests: dict[str, dict[str, Any]] = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        """As the parent's; `digests` gets the file's entry when the block ends well."""
        try:
            with Path(path).open(mode) as file:
                stream = _Digested(file)
                yield stream
            self.digests[Path(path).name] = {"bytes": stream.num_bytes, "sha256": stream.digest.hexdigest()}
        except OSError as error:
            self.failure = self.failure or error
            raise
        except Exception as error:
            if self.failure is None and isinstance(error.__context__, OSError):
                self.failure = error.__context__
            raise


class _Digested:
    """A file opened for writing, and the digest of what has been written to it."""

    def __init__(self, file: Any) -> None:
        self._file, self.digest, self.num_bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        written: int = self._file.write(data)
        assert written == memoryview(data).nbytes
        self.digest.update(data)
        self.num_bytes += written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
