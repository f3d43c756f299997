"""Speed of GPUs that share a sequence, with one GPU as the baseline, in one run.

    torchrun --nproc-per-node 2 -m tileattn bench distributed_gpu

It times both passes, full and causal, by schedule, in bfloat16 with D = 128: 16 heads of 131,072
tokens, and 16 query heads with 2 KV heads of 32,768. The baseline runs on rank 0 while the others
wait. The fraction of linear scaling is its time, over that of the ranks times their number.

GPUs of one host differ, and may slow one another down. So the baseline also runs on all GPUs at
once, and a second fraction uses the time of the slowest: what is missing to 1 is due to the
schedule. A time is the median of rounds, each measured by events on the slowest GPU. The share of
memory is the peak of a rank, inputs and results included, times the ranks, over that of one GPU.
The file is distributed_gpu.json.
"""

import os
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import tileattn
import tileattn.distributed as dist
from benchmarks import report
from benchmarks.configurations import Configuration, draw
from benchmarks.cpu import rounded
from benchmarks.distributed import call_of
from benchmarks.report import Row, one_line
from tileattn.distributed.comm.connect import communicator
from tileattn.distributed.comm.protocol import Communicator

SCHEDULES = "ring", "heads", "gather", "auto"
SIZES = (131_072, None), (32_768, 2)  # tokens, and key heads
TIMEOUT = 120.0
HOW = "start it on several GPUs: torchrun --nproc-per-node 2 -m tileattn bench distributed_gpu"


class Bench(NamedTuple):
    """The ranks, and the number and length of rounds."""

    link: Communicator
    comm: Any
    rounds: int
    least_ms: float

    def median(self, call: Callable[[], Any]) -> float:
        """Return the milliseconds of a call: the median over rounds of the slowest rank."""
        import cupy

        call()
        call()
        once = max(self.link.gather(_milliseconds(call, 1)))
        count = max(1, min(20, int(self.least_ms / max(once, 1e-3))))
        found = []
        for _ in range(self.rounds):
            cupy.cuda.get_current_stream().synchronize()
            self.link.gather(None)  # a barrier
            found.append(max(self.link.gather(_milliseconds(call, count))))
        return float(np.median(found))


def _milliseconds(call: Callable[[], Any], count: int) -> float:
    import cupy

    stream = cupy.cuda.get_current_stream()
    start, end = (cupy.cuda.Event() for _ in range(2))
    start.record(stream)
    for _ in range(count):
        call()
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / count


def _inputs(one: Configuration, arrays: list[Any]) -> list[Any]:
    """Return the inputs of the pass: forward has no upstream gradient."""
    return arrays[:3] if one.kind == "forward" else arrays


def _held(bench: Bench, call: Callable[[], Any], inputs: list[Any]) -> float:
    """Return the peak MiB of the rank that holds most in a call, inputs included."""
    import cupy

    pool = cupy.cuda.MemoryPool()  # it keeps its peak
    with cupy.cuda.using_allocator(pool.malloc):
        call()
        cupy.cuda.get_current_stream().synchronize()
    nbytes = pool.total_bytes() + sum(x.nbytes for x in inputs)
    return float(max(bench.link.gather(nbytes)) / 2**20)


def measured(bench: Bench, one: Configuration, schedules: list[str]) -> Iterator[Row]:
    """Time a call by schedule, and on one GPU."""
    import cupy

    link, options, pool = bench.link, one.mask.options(), cupy.get_default_memory_pool()
    ranks, arrays = link.size, list(draw(cupy, one.shapes, one.dtype))
    whole_call = call_of(tileattn, one.kind, arrays, options)
    alone = whole_call if link.rank == 0 else lambda: None
    single, whole = bench.median(alone), _held(bench, alone, _inputs(one, arrays))
    each = bench.median(whole_call)
    layout = dist.Layout.zigzag(one.N, ranks)
    own = [layout.take(x, link.rank) for x in arrays]
    del arrays, alone, whole_call
    pool.free_all_blocks()
    for schedule in schedules:
        row = one.row() | {"ranks": ranks, "schedule": schedule, "layout": "zigzag"}
        given: dict[str, Any] = {"layout": layout, "schedule": schedule, "timeout": TIMEOUT}
        call = call_of(dist, one.kind, own, given | options, bench.comm)
        try:
            milliseconds, held = bench.median(call), _held(bench, call, _inputs(one, own))
        except (ValueError, RuntimeError, NotImplementedError) as error:
            yield row | {"failed": one_line(error)}
            continue
        pool.free_all_blocks()
        row |= {"ms": milliseconds, "one_gpu_ms": single, "each_gpu_ms": each, "held_mib": held}
        row |= {"fraction_of_linear": single / milliseconds / ranks}
        row |= {"fraction_of_each_gpu": each / milliseconds / ranks}
        yield row | {"share_of_memory": ranks * held / whole}


def rows(bench: Bench, sizes: Any, schedules: list[str]) -> Iterator[Row]:
    for (N, heads), causal, kind in product(sizes, (False, True), ("forward", "both")):
        one = Configuration(kind, "bf16", 1, 16, N, 128, causal, Hkv=heads)
        for row in measured(bench, one, schedules):
            yield rounded(row)


def main(argv: list[str] | None = None) -> None:
    """Measure on all ranks; rank 0 shows and writes the rows."""
    parser = report.parser("distributed_gpu", __doc__)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="(5)")
    add("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    add("--length", type=int, help="tokens of both sizes")
    arguments = report.parsed(parser, argv)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(HOW)
    import cupy
    import torch

    rank = int(os.environ["LOCAL_RANK"])
    cupy.cuda.Device(rank).use()
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    comm = torch.distributed.group.WORLD
    with cupy.cuda.Stream(non_blocking=True):
        link = communicator(comm, TIMEOUT, cupy.empty(0))
        bench = Bench(link, comm, arguments.rounds, 100.0)
        sizes = [(arguments.length or N, heads) for N, heads in SIZES]
        made = rows(bench, sizes, arguments.schedules)
        if rank == 0:
            machine = report.host() | {"ranks": link.size, "nccl": str(torch.cuda.nccl.version())}
            name = cupy.cuda.runtime.getDeviceProperties(rank)["name"]
            machine |= {"gpu": name.decode() if isinstance(name, bytes) else name}
            path = arguments.to / "distributed_gpu.json"
            report.written(made, path, lambda: machine, arguments.ran)
        else:
            for _ in made:
                pass
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
