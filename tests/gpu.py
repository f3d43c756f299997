"""What tests on a GPU share."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tileattn

REASON = tileattn.available_backends()["cupy"]

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=f"cupy: {REASON}")]
"""Marks of every test that launches kernels: the mark ``gpu``, and a skip that says why."""


def random_arrays(*shapes: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> list[Any]:
    """Draw standard-normal CuPy arrays."""
    import cupy

    rng = np.random.default_rng(seed)
    return [cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def busy(milliseconds: float) -> Callable[[], None]:
    """Compile a kernel that keeps one thread of the GPU busy, and return what starts it."""
    import cupy

    code = r"""
    __device__ unsigned long long nanoseconds() {
        unsigned long long now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        return now;
    }
    extern "C" __global__ void wait(unsigned long long time) {
        const unsigned long long start = nanoseconds();
        while (nanoseconds() - start < time) {}
    }"""
    kernel = cupy.RawKernel(code, "wait")
    kernel((1,), (1,), (np.uint64(0),))
    return lambda: kernel((1,), (1,), (np.uint64(milliseconds * 1e6),))


def bits(results: Any) -> list[bytes]:
    """Copy what a call returned to the host, byte by byte."""
    return [x.get().tobytes() for x in results if x is not None]


def poison(nbytes: int = 1 << 28) -> None:
    """Fill the free memory of CuPy's pool with bytes that are NaN in every type."""
    import cupy

    blocks = [cupy.full(n, 0xFF, np.uint8) for n in (nbytes, *(1 << e for e in range(9, 25)))]
    blocks += [cupy.full(512 * n, 0xFF, np.uint8) for n in range(1, 200)]
    cupy.cuda.get_current_stream().synchronize()
    del blocks
