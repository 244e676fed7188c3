"""The processes of a run: who makes which samples, who speaks, and how they agree.

torchrun starts the ranks; one process without it is a run of one rank, and everything here then does nothing. The
ranks form a mesh replicate x shard x ulysses x tensor: those that differ in the first two axes are data ranks and
make different samples, the others share a sample. What is said here is small (rewards, metrics, a flag) and goes over
a gloo group of its own, so that it never stands between the messages of the layers. The hazard is a rank that leaves
the others waiting: what one rank alone does goes through `on_first`, which tells its error to all, and every group is
made with `parallel.timeout_s`, for PyTorch gives a new one half an hour.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stretto.attempt import store_of_this_attempt
from stretto.config import Parallel
from stretto.first_failure import FirstFailure
from stretto.record.signals import Interrupted
from stretto.rewards.failures import JudgeError, RewardError

__all__ = ["AXES", "Ranks"]

AXES = ("replicate", "shard", "ulysses", "tensor")

T = TypeVar("T")


class Ranks:
    """This process among those of the run; `Ranks.open` makes it.

    rank, world_size: among all. data_rank, num_data_ranks: among those that make different samples. is_first: rank 0,
    which alone writes to the run folder. speaks: the first of the ranks that share its samples, whose rewards count.
    mesh: over `AXES`; None for one process. before_leaving: what is still done, in a moment, where the process ends
    by a failure and nothing is unwound.
    """

    def __init__(
        self, sizes: Sequence[int], rank: int = 0, mesh: DeviceMesh | None = None, timeout: timedelta | None = None
    ) -> None:
        self.rank, self.mesh, self._timeout = rank, mesh, timeout
        self.sizes = dict(zip(AXES, sizes))
        self.world_size = math.prod(sizes)
        sharing = self.sizes["ulysses"] * self.sizes["tensor"]
        self.data_rank, model_rank = divmod(rank, sharing)
        self.num_data_ranks = self.world_size // sharing
        self.is_first, self.speaks = rank == 0, model_rank == 0
        self._sharing = sharing
        self.failures: FirstFailure | None = None
        self.before_leaving: list[Callable[[], None]] = []
        self._control: dist.ProcessGroup | None = None

    @classmethod
    @contextmanager
    def open(cls, parallel: Parallel, device_type: str = "cpu") -> Iterator["Ranks"]:
        """Join the ranks that torchrun started, on `device_type`, and leave them at the end.

        Where anything is raised inside, the process ends here, within a bound, having told which rank failed first
        and why; but for `Interrupted`, which all ranks raise together. A process group that is there already is used,
        and left as it is. Raises ValueError where the number of ranks is not the product of the axes.
        """
        is_guest = dist.is_initialized()
        world_size = dist.get_world_size() if is_guest else int(os.environ.get("WORLD_SIZE", "1"))
        sizes = mesh_sizes(parallel, world_size)
        if world_size == 1:
            yield cls(sizes)
            return
        timeout = timedelta(seconds=parallel.timeout_s)
        with nullcontext() if is_guest else _joined(device_type, timeout) as failures:
            mesh = init_device_mesh(device_type, tuple(sizes), mesh_dim_names=AXES)
            ranks = cls(sizes, dist.get_rank(), mesh, timeout)
            ranks._bound(mesh)
            ranks.failures = failures
            ranks._control = dist.new_group(backend="gloo", timeout=timeout)
            yield ranks

    @contextmanager
    def failing_fast(self) -> Iterator[None]:
        """Inside, what is raised ends the process before anything is unwound that could wait for a lost rank."""
        try:
            yield
        except Interrupted as stop:
            if self.failures is not None and stop.at_once:  # others may not have been told, and see this rank gone
                self.failures.report(stop)
            raise
        except BaseException as error:
            if self.failures is not None:
                for function in self.before_leaving:
                    with suppress(OSError):
                        function()
                self.failures.leave(error)
            raise

    def phase(self, name: str) -> None:
        """Say what this rank does from here on, for the line that tells of a failure."""
        if self.failures is not None:
            self.failures.phase(name)

    def gather(self, value: T) -> list[T]:
        """What every data rank gives, in their order, on every rank; of ranks that share samples the first counts."""
        if self._control is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value if self.speaks else None, group=self._control)
        return values[:: self._sharing]

    def most(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        if self._control is None:
            return number
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._control)
        return int(value)

    def sum(self, value: float) -> float:
        """The sum over all ranks, in float64."""
        if self._control is None:
            return value
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self._control)
        return float(total)

    def on_first(self, function: Callable[[], T]) -> T:
        """What `function` gives on rank 0, on every rank; its ValueError or OSError is raised on every rank.

        A RewardError or a JudgeError is one everywhere; of another ValueError the others raise a plain one.
        """
        if self._control is None:
            return function()
        outcome: list[Any] = [None, None]
        failure: ValueError | OSError | None = None
        if self.is_first:
            try:
                outcome[0] = function()
            except (ValueError, OSError) as error:
                failure = error
                is_plain = isinstance(error, ValueError) and not isinstance(error, RewardError | JudgeError)
                outcome[1] = str(error) if is_plain else error
        dist.broadcast_object_list(outcome, src=0, group=self._control)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            told = ValueError(outcome[1]) if isinstance(outcome[1], str) else outcome[1]
            raise told from dist.DistError("rank 0 raised it")
        result: T = outcome[0]
        return result

    @property
    def summed_over(self) -> list[int]:
        """The data rank of every rank over which gradients are summed, in mesh order; Ulysses ranks share theirs."""
        return [rank for rank in range(self.num_data_ranks) for _ in range(self.sizes["ulysses"])]

    @cached_property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks that hold one model between them, tensor parallel aside: FSDP2's mesh."""
        assert self.mesh is not None
        mesh = self.mesh["shard", "ulysses"]._flatten("shard_ulysses")
        self._bound(mesh)
        return mesh

    def group_of(self, *axes: str) -> dist.ProcessGroup:
        """A new group of the ranks that differ from this one in `axes` alone, in mesh order; all ranks call it."""
        assert self.mesh is not None
        kept = [axis for axis in AXES if axis not in axes]
        lines = self.mesh.mesh.permute(*(AXES.index(axis) for axis in (*kept, *axes)))
        mine = None
        for line in lines.reshape(-1, math.prod(self.sizes[axis] for axis in axes)).tolist():
            group = dist.new_group(line, timeout=self._timeout)
            mine = group if self.rank in line else mine
        assert mine is not None
        return mine

    def new_control_group(self) -> dist.ProcessGroup | None:
        """Another gloo group of all ranks, for work in the background; None for one process."""
        return None if self._control is None else dist.new_group(backend="gloo", timeout=self._timeout)

    def _bound(self, mesh: DeviceMesh) -> None:
        """Let the mesh's groups wait as long as all others: PyTorch makes them with half an hour."""
        assert self._timeout is not None
        for group in mesh.get_all_groups():
            if group is not dist.group.WORLD:
                dist.distributed_c10d._set_pg_timeout(self._timeout, group)


def mesh_sizes(parallel: Parallel, world_size: int) -> tuple[int, ...]:
    """The size of every axis; `replicate` = 0 takes what is left. Raises ValueError where they do not fit."""
    others = parallel.shard * parallel.ulysses * parallel.tensor
    replicate = parallel.replicate or max(1, world_size // others)
    sizes = (replicate, parallel.shard, parallel.ulysses, parallel.tensor)
    if math.prod(sizes) != world_size:
        wanted = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes))
        divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
        way_out = (
            f"start {math.prod(sizes)} (torchrun --nproc-per-node {math.prod(sizes)} -m stretto train ...), or take "
            f"sizes whose product is {world_size}: divisors of it are {', '.join(map(str, divisors))}"
        )
        raise ValueError(f"parallel: {wanted} are {math.prod(sizes)} ranks, and there are {world_size}; {way_out}")
    return sizes


@contextmanager
def _joined(device_type: str, timeout: timedelta) -> Iterator[FirstFailure]:
    """The default process group of torchrun's ranks, and the account of their first failure."""
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store = store_of_this_attempt(store, rank, world_size, timeout)
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    with FirstFailure(store, rank, world_size) as failures:
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
            yield failures
            dist.destroy_process_group()
        except Interrupted:
            dist.destroy_process_group()
            raise
        except BaseException as error:
            failures.leave(error)
