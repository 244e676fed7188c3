"""One of two ranks: `python leaving_cases.py RANK PORT HOW`. Rank 0 leaves while gloo still holds one of its tensors.

The last thing before the interpreter's end keeps its lock for a second or more, and in that time the sum is made: so
the thread that lets the tensor go is waiting for the lock when the end begins.
"""

import atexit
import sys
import time
from datetime import timedelta

if sys.argv[1] == "0":
    atexit.register(sum, range(10**8))  # what is registered first is run last

import torch
import torch.distributed as dist

from stretto.leaving import end_process

if __name__ == "__main__":
    rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    print("unflushed", end="")
    if rank == 1:
        time.sleep(0.5)
        dist.all_reduce(torch.ones(3))
        time.sleep(5)
        end_process(0)
    dist.all_reduce(torch.ones(3), async_op=True)
    if how == "ours":
        end_process(3)
    sys.exit(3)
