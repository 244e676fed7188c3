"""What ranks do with checkpoints in tests/record/test_sharded_checkpoint.py."""

import errno
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from stretto.record.checkpoint import Checkpoints
from stretto.record.sharded_files import ShardedWriter

IDENTITY = {"adapter": "digits"}
SHAPES = {"even": (8, 6), "uneven": (10, 3), "few": (2, 5), "one": (1,), "columns": (3, 7), "copied": (5, 5)}


def whole(iteration):
    """The state, before it is split."""
    generator = torch.Generator().manual_seed(iteration)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    state["bfloat16"] = torch.randn(9, 4, generator=generator).bfloat16()
    state["plain"] = torch.randn(3, 3, generator=generator)
    return state | {"step": torch.tensor(float(iteration))}


def split(state, seed=0):
    """The same as DTensors over all ranks in one or two axes, uneven and empty shards among them; two stay plain."""
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    square = init_device_mesh("cpu", (2, size // 2)) if size % 2 == 0 else line
    placements = {
        "even": (square, [Shard(0), Shard(1)][: square.ndim]),
        "uneven": (line, [Shard(0)]),
        "few": (line, [Shard(0)]),
        "one": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "copied": (square, [Replicate(), Shard(0)][: square.ndim]),
        "bfloat16": (line, [Shard(seed % 2)]),
    }
    return {
        name: distribute_tensor(tensor, *placements[name]) if name in placements else tensor.clone()
        for name, tensor in state.items()
    }


def opened(folder, timeout_s=30, **options):
    """The checkpoints, with a group of their own."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return Checkpoints(Path(folder), IDENTITY, group=group, **options)


def save(folder, iteration, asynchronous):
    with opened(folder, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(iteration, split(whole(iteration)), {"rank": dist.get_rank()})
    return sorted(path.name for path in Path(folder).iterdir())


def load(folder):
    """The newest into zeros that are split otherwise; returns its iteration, plain state and notes."""
    zeros = split({name: torch.zeros_like(tensor) for name, tensor in whole(0).items()}, seed=1)
    with opened(folder) as checkpoints:
        found = checkpoints.load_newest(zeros)
    for name, expected in whole(found.iteration).items():
        filled = zeros[name].full_tensor() if isinstance(zeros[name], DTensor) else zeros[name]
        assert filled.dtype == expected.dtype
        assert torch.equal(filled, expected), name
    return found.iteration, found.plain, found.notes


def late(seconds=1.0):
    """Writing takes so much longer."""
    write = ShardedWriter.write_data
    return mock.patch.object(ShardedWriter, "write_data", lambda *args: (time.sleep(seconds), write(*args))[1])


def failing(rank, act):
    """`act()` before this rank writes."""
    write, mine = ShardedWriter.write_data, dist.get_rank() == rank
    return mock.patch.object(ShardedWriter, "write_data", lambda *args: (act() if mine else None, write(*args))[1])


def beside_other_collectives(folder):
    """Two saves in a row while the default group is busy; returns seconds in `save` and the sums' count."""
    checkpoints, blocked, num_sums = opened(folder), [], 0
    with late():
        for iteration in (1, 2):
            state = split(whole(iteration))
            start = time.monotonic()
            checkpoints.save(iteration, state, {})
            blocked.append(time.monotonic() - start)
            for tensor in state.values():
                tensor.zero_()
            for _ in range(50):
                total = torch.ones(1000)
                dist.all_reduce(total)
                assert torch.equal(total, torch.full((1000,), float(dist.get_world_size())))
                num_sums += 1
        checkpoints.close()
    return blocked, num_sums


def killed(folder, victim):
    """The victim is killed while it writes; the others tell what they are told."""
    checkpoints = opened(folder, timeout_s=4)  # a survivor may wait for another, which does not end here
    checkpoints.save(1, split(whole(1)), {})
    checkpoints.wait()
    with failing(victim, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        checkpoints.save(2, split(whole(2)), {})
        with pytest.raises(RuntimeError, match="iteration-00000002: not saved: ") as caught:
            checkpoints.wait()
    assert "\n" not in str(caught.value)


def save_and_wait(checkpoints, iteration):
    """The error comes at the next save or at the wait."""
    checkpoints.save(iteration, split(whole(iteration)), {})
    if iteration % 2:
        checkpoints.wait()
    else:
        checkpoints.save(iteration + 1, {}, {})


def refused(folder, rank, asynchronous):
    """One rank's disk is full: every rank is told, nothing half-written stays, and the next save is well."""

    def fill():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(folder, asynchronous=asynchronous) as checkpoints:
        checkpoints.save(1, split(whole(1)), {})
        checkpoints.wait()
        with failing(rank, fill), pytest.raises(OSError, match=r"No space left on device: .*iteration-00000002'$"):
            save_and_wait(checkpoints, 2)
        dist.barrier()
        assert [path.name for path in Path(folder).iterdir()] == ["iteration-00000001"]
        checkpoints.save(4, split(whole(4)), {})


def unseen(folder):
    """One rank has another disk under the folder's name."""
    where = Path(folder) if dist.get_rank() == 0 else Path(folder) / "elsewhere"
    with (
        opened(where, asynchronous=False) as checkpoints,
        pytest.raises(ValueError, match=r"rank 1 does not see it; take a run.folder on a disk that all ranks share"),
    ):
        checkpoints.save(1, split(whole(1)), {})


def told(folder):
    """What `newest_whole` raises here."""
    with opened(folder) as checkpoints, pytest.raises(ValueError, match="checkpoint") as caught:
        checkpoints.newest_whole()
    return str(caught.value)


def refused_shape(folder):
    """What loading a tensor of another shape raises here."""
    with opened(folder) as checkpoints, pytest.raises(ValueError, match="another model") as caught:
        checkpoints.load_newest({"few": torch.zeros(3, 5), "absent": torch.zeros(1)})
    return str(caught.value)
