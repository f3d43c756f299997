"""Peak device memory of one case, counted by the allocator."""

import time
from typing import Any

from benchmarks.gpu_device import Gpu, Inputs
from benchmarks.memory_case import Case
from benchmarks.report import Row


class Counting:
    """An allocator that remembers the most that a pool had in use.

    Use only grows when memory is asked for, so it is looked at there and nowhere else.

    Parameters
    ----------
    pool : cupy.cuda.MemoryPool
        A pool for nothing else.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.peak = 0

    def malloc(self, nbytes: int) -> Any:
        """Take memory from the pool."""
        pointer = self._pool.malloc(nbytes)
        self.peak = max(self.peak, self._pool.used_bytes())
        return pointer


def room(device: Gpu) -> int:
    """Bytes of device memory that are free."""
    device.release()
    free: int = device.xp.cuda.Device().mem_info[0]
    return free


def peak(device: Gpu, case: Case) -> Row:
    """Measure a case; its inputs come from another pool."""
    cuda = device.xp.cuda
    inputs = inputs_of(device, case)
    case.run(inputs, device.xp)  # compiles and loads what is lazy
    device.release()
    pool = cuda.MemoryPool()
    counting = Counting(pool)
    cuda.Device().synchronize()
    start = time.perf_counter()
    try:
        with cuda.using_allocator(counting.malloc):
            results = case.run(inputs, device.xp)
            cuda.Device().synchronize()
        seconds = time.perf_counter() - start
        del results
    finally:
        pool.free_all_blocks()
    return {"peak_bytes": counting.peak, "seconds": seconds}


def inputs_of(device: Gpu, case: Case) -> Inputs:
    """Arrays of a case, from the current pool."""
    arrays = (device.normal(shape, case.dtype, i) for i, shape in enumerate(case.shapes))
    return Inputs(*arrays)
