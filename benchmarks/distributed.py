"""Speed of ranks that share a sequence, with one rank as the baseline, in one run.

    mpiexec -n 4 python -m tileattn bench distributed
    torchrun --nproc-per-node 4 -m tileattn bench distributed --quick

It times both passes, full and causal, by schedule and layout; heads-2 is ("heads", 2). The baseline
runs on rank 0, on the whole sequence, with as many threads as each rank has, while the others
sleep. The fraction of linear scaling is its time, over that of the ranks times their number. Ranks
divide the cores of their host, unless TILEATTN_NUM_THREADS is set. A time is the shortest of
several rounds of the slowest rank. The file is distributed_cpu.json.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import tileattn
import tileattn.distributed as dist
from benchmarks import report
from benchmarks.configurations import Call, Configuration, draw
from benchmarks.cpu import rounded
from benchmarks.report import Row, one_line
from tileattn.backends import threads
from tileattn.distributed.comm.connect import communicator
from tileattn.distributed.comm.protocol import Communicator
from tileattn.errors import UnsupportedError

SCHEDULES: dict[str, Any] = {name: name for name in ("ring", "heads", "gather", "auto")}
SCHEDULES |= {f"heads-{n}": ("heads", n) for n in (2, 4)}
LAYOUTS, KINDS = ("contiguous", "zigzag"), ("forward", "both")
LENGTHS, QUICK_LENGTHS = (4096, 16384), (512,)
LEAST_ROUNDS, MOST_ROUNDS = 3, 50
TIMEOUT = 3600.0  # seconds that the call on one rank may take
HOW = (
    "there is only one rank: start several by `mpiexec -n 2 python -m tileattn "
    "bench distributed` or `torchrun --nproc-per-node 2 -m tileattn bench distributed`"
)

Start = Callable[[], Communicator | None]


class Bench(NamedTuple):
    """The ranks, and how long they measure."""

    comm: Communicator
    seconds: float
    schedules: list[str]

    def shortest(self, call: Call) -> float:
        """Return the shortest seconds, over rounds, of the slowest rank."""
        taken = [max(self._round(call)) for _ in range(2)][1]  # the first one warms up
        rounds = min(max(int(self.seconds / taken), LEAST_ROUNDS), MOST_ROUNDS)
        return min(max(self._round(call)) for _ in range(rounds))

    def _round(self, call: Call) -> list[float]:
        self.comm.gather(None)  # a barrier
        start = time.perf_counter()
        call()
        return self.comm.gather(time.perf_counter() - start)


def started() -> Communicator | None:
    """Return the ranks of torchrun, else of MPI; None without either."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        comm: Any = torch.distributed.group.WORLD
    else:
        try:
            from mpi4py import MPI
        except ImportError:
            return None
        comm = MPI.COMM_WORLD
    return communicator(comm, TIMEOUT)


def share_cores(comm: Communicator) -> None:
    """Set the threads of this rank: its part of the cores of the host."""
    hosts = comm.gather(platform.node())
    cores = threads.worker_count.__wrapped__() // hosts.count(platform.node())
    os.environ.setdefault("TILEATTN_NUM_THREADS", str(max(1, cores)))


def call_of(
    library: Any, kind: str, arrays: Sequence[Any], options: dict[str, Any], *comm: Any
) -> Call:
    """Return a call of a forward pass, or of both, of `tileattn` or `tileattn.distributed`."""
    q, k, v, dout = arrays

    def call() -> None:
        attention = library.forward(q, k, v, *comm, **options)
        if kind != "forward":
            library.backward(dout, q, k, v, *attention, *comm, **options)

    return call


def measured(bench: Bench, one: Configuration) -> Iterator[Row]:
    """Time a call by schedule and layout, and on one rank."""
    comm, options = bench.comm, one.mask.options()
    arrays = draw(np, one.shapes, one.dtype)
    alone = call_of(tileattn, one.kind, arrays, options)
    single = bench.shortest(alone if comm.rank == 0 else lambda: None)
    for schedule, name in product(bench.schedules, LAYOUTS):
        row = one.row() | {"ranks": comm.size, "threads": threads.worker_count()}
        row |= {"schedule": schedule, "layout": name}
        try:
            seconds = bench.shortest(shared(bench, one, schedule, name, arrays))
        except (ValueError, UnsupportedError) as error:  # which all ranks raise
            yield row | {"failed": one_line(error)}
            continue
        fraction = single / seconds / comm.size
        ms = {"ms": 1e3 * seconds, "one_rank_ms": 1e3 * single}
        yield row | ms | {"fraction_of_linear": fraction}


def shared(
    bench: Bench, one: Configuration, schedule: str, name: str, arrays: Sequence[Any]
) -> Call:
    """Return the call of this rank."""
    comm, N = bench.comm, one.N
    cuts = np.diff(np.arange(comm.size + 1) * N // comm.size).tolist()
    zigzag = name == "zigzag"
    layout = dist.Layout.zigzag(N, comm.size) if zigzag else dist.Layout.contiguous(cuts)
    own = [layout.take(x, comm.rank) for x in arrays]
    options: dict[str, Any] = {"layout": layout, "schedule": SCHEDULES[schedule]}
    return call_of(dist, one.kind, own, options | one.mask.options(), comm)


def rows(bench: Bench, lengths: list[int], heads: int) -> Iterator[Row]:
    for N, causal, kind in product(lengths, (False, True), KINDS):
        for row in measured(bench, Configuration(kind, "f32", 1, heads, N, 64, causal)):
            yield rounded(row)


def main(argv: list[str] | None = None, start: Start = started) -> None:
    """Measure on all ranks; rank 0 shows and writes the rows."""
    parser = report.parser("distributed", __doc__)
    add = parser.add_argument
    add("--schedules", type=partial(report.names, tuple(SCHEDULES)), default=list(SCHEDULES))
    add("--length", type=int, nargs="+", help="tokens (4096 16384)")
    add("--heads", type=int, default=8, help="(8)")
    add("--quick", action="store_true", help="a small size, a tenth of the time")
    add("--seconds", type=float, default=5.0, help="for each configuration (5)")
    arguments: argparse.Namespace = report.parsed(parser, argv)
    comm = start()
    if comm is None or comm.size == 1:
        sys.exit(HOW)
    share_cores(comm)
    seconds = arguments.seconds / (10 if arguments.quick else 1)
    lengths = arguments.length or list(QUICK_LENGTHS if arguments.quick else LENGTHS)
    made = rows(Bench(comm, seconds, arguments.schedules), lengths, arguments.heads)
    if comm.rank == 0:
        program = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "mpiexec"
        machine = report.host() | {"ranks": comm.size, "started_by": program}
        path = arguments.to / "distributed_cpu.json"
        report.written(made, path, lambda: machine, arguments.ran)
    else:
        for _ in made:
            pass


if __name__ == "__main__":
    main()
