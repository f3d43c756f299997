"""What tests on a GPU share."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.poison import cupy_pool
from tileattn import Attention, Gradients, reference
from tileattn.testing import assert_attention_close, error_bound

REASON = tileattn.available_backends()["cupy"]

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=f"cupy: {REASON}")]
"""Marks of every test that launches kernels: the mark ``gpu``, and a skip that says why."""


def random_arrays(*shapes: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> list[Any]:
    """Draw standard-normal CuPy arrays."""
    rng = np.random.default_rng(seed)
    return [sent(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def busy(milliseconds: float, sms: int = 1) -> Callable[[], None]:
    """Compile a kernel that keeps some SMs of the GPU busy, and return what starts it."""
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
    shared = 0 if sms == 1 else 120 << 10  # more than half of what there is: one block an SM
    kernel.max_dynamic_shared_size_bytes = shared
    kernel((1,), (1,), (np.uint64(0),), shared_mem=shared)
    return lambda: kernel((sms,), (1,), (np.uint64(milliseconds * 1e6),), shared_mem=shared)


def sent(x: Any) -> Any:
    """Copy arrays to the GPU; leave the rest."""
    import cupy

    return cupy.asarray(x) if isinstance(x, np.ndarray) else x


def bits(results: Any) -> list[bytes]:
    """Give the bytes of what a call returned, wherever the arrays are."""
    return [getattr(x, "get", lambda x=x: x)().tobytes() for x in results if x is not None]


def host(results: Any) -> Any:
    """Copy what a call returned to the host."""
    made = type(results)(*map(_at_host, results))
    if isinstance(results, Gradients) and results.daux is not None:
        made.daux = tuple(map(_at_host, results.daux))
    return made


def _at_host(x: Any) -> Any:
    return x if x is None else x.get()


def hold(
    given: Sequence[Any], attention: Attention, grads: Gradients, options: dict[str, Any]
) -> None:
    """Compare both passes over q, k, v and dout with the oracle."""
    q, k, v, dout = (x.get() for x in given)
    there = {name: x.get() if hasattr(x, "get") else x for name, x in options.items()}
    bounds = error_bound(q, k, v, dout, **there)
    assert_attention_close(host(attention), reference.forward(q, k, v, **there), bounds)
    assert_attention_close(host(grads), reference.backward(dout, q, k, v, **there), bounds)


poisoned = cupy_pool
"""Otherwise an array may hold the right results of an earlier call."""
