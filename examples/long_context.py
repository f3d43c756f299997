"""A long sequence over as many ranks as there are: both passes, time and peak memory.

mpiexec -n 2 python examples/long_context.py
mpiexec -n 8 python examples/long_context.py --length 1048576 --window 4096

Each rank draws and keeps its own tokens only. Heads are computed one after another. Set
TILEATTN_NUM_THREADS to the cores of each rank where a host has several.
"""

import argparse
import resource
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

import tileattn.distributed as dist
from tileattn.progress import Progress

MIB = 2**20 if sys.platform == "darwin" else 2**10  # ru_maxrss is in bytes there, in KiB elsewhere


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--length", type=int, default=8192, help="tokens of the sequence, as 1048576 (8192)")
    add("--window", type=int, help="tokens before it that a query attends to (all)")
    add("--heads", type=int, default=4, help="(4)")
    add("--head-dim", type=int, default=64, help="(64)")
    return parser.parse_args()


def peak_mib() -> float:
    """Give the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


def main() -> None:
    """Compute causal attention and its gradients on all ranks; print a line for each rank."""
    args, comm = arguments(), MPI.COMM_WORLD
    # A window leaves all ranks equal work; without one, those of zigzag have it.
    layout = dist.Layout.zigzag(args.length, comm.size)
    if args.window is not None:
        cuts = np.arange(comm.size + 1) * args.length // comm.size
        layout = dist.Layout.contiguous(np.diff(cuts).tolist())
    options: dict[str, Any] = {"causal": True, "layout": layout}
    if args.window is not None:
        options["window"] = args.window, 0
    progress, before = Progress(sys.stdout), peak_mib()
    times = np.zeros(2)
    for head in range(args.heads):
        rng = np.random.default_rng([head, comm.rank])
        shape = 4, 1, 1, layout.length_of(comm.rank), args.head_dim
        q, k, v, dout = rng.standard_normal(shape, np.float32)
        start = time.perf_counter()
        _, pullback = dist.vjp(q, k, v, comm, **options)
        middle = time.perf_counter()
        pullback(dout)
        times += middle - start, time.perf_counter() - middle
        if comm.rank == 0:
            progress((head + 1) / args.heads, f"{head + 1} of {args.heads} heads")
    found = comm.gather((*times, before, peak_mib()))
    if found is not None:
        progress.end()
        print(f"{args.length} tokens, {args.heads} heads of {args.head_dim}, {comm.size} ranks")
        for rank, (forward, backward, first, peak) in enumerate(found):
            print(
                f"rank {rank}: forward {forward:.2f} s, backward {backward:.2f} s, "
                f"peak memory {peak:.0f} MiB, {peak - first:.0f} of them since the imports"
            )


if __name__ == "__main__":
    main()
