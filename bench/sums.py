"""The error of a reduce-scatter's sum over ranks in 16 bits: the ring, direct, and one rounding of the exact sum.

    python -m bench.sums [--ranks 2 4 8 16] [--json FILE]

Every rank multiplies its columns of one random problem; what arrives is compared with the float64 product of the
whole. Relative root mean square error over all ranks. The hazard: products of few terms would round exactly, so each
rank multiplies 256 features.
"""

import argparse
import functools
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.record import write_result
from stretto.leaving import end_process
from stretto.overlap import matmul_reduce_scatter

ROWS, FEATURES, K = 64, 128, 256
DTYPES = ("bfloat16", "float16")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'dtype':10}{'ranks':>6}{'ring':>12}{'direct':>12}{'one rounding':>14}")
    for dtype in DTYPES:
        for num_ranks in options.ranks:
            row = {"dtype": dtype, "ranks": num_ranks, **measured(dtype, num_ranks)}
            rows.append(row)
            print(f"{dtype:10}{num_ranks:6}{row['ring']:12.3e}{row['direct']:12.3e}{row['rounding']:14.3e}")
    write_result(options.json, {"rows": rows, "shape": {"rows a rank": ROWS, "features": FEATURES, "K a rank": K}})


def measured(dtype, num_ranks):
    """Relative errors of ring, direct and of rounding the exact result once."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(functools.partial(one_rank, num_ranks, dtype, folder), nprocs=num_ranks)
        return torch.load(Path(folder) / "errors.pt")


def one_rank(num_ranks, dtype, folder, rank):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS * num_ranks, K * num_ranks, generator=generator).to(kind)
    weight = torch.randn(FEATURES, K * num_ranks, generator=generator).to(kind)
    own = slice(ROWS * rank, ROWS * (rank + 1))
    exact = x[own].double() @ weight.double().t()
    columns = slice(K * rank, K * (rank + 1))
    mine = x[:, columns].contiguous(), weight[:, columns].contiguous()
    found = {"rounding": exact.to(kind)}
    for schedule in ("ring", "direct"):
        found[schedule] = matmul_reduce_scatter(*mine, dist.group.WORLD, schedule=schedule)
    squares = torch.stack([(value.double() - exact).square().sum() for value in found.values()])
    squares = torch.cat([squares, exact.square().sum().view(1)])
    dist.all_reduce(squares)
    if rank == 0:
        errors = (squares[:-1] / squares[-1]).sqrt().tolist()
        torch.save(dict(zip(found, errors)), Path(folder) / "errors.pt")
    dist.barrier()
    dist.destroy_process_group()
    end_process(0)


if __name__ == "__main__":
    main()
