"""Helpers of the tests on a GPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.poison import cupy_pool
from tileattn import Attention, Gradients, reference
from tileattn.dtypes import FLOAT8_E4M3FN
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


@contextmanager
def captured(call: Callable[[], Any]) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Capture a call in a graph; yield its results, and a function that replays it and waits."""
    import cupy

    cupy.cuda.Device().synchronize()  # what the call reads may be written on another stream
    pool = cupy.cuda.MemoryPool()  # nothing else gets the memory that a replay writes to
    with cupy.cuda.Stream(non_blocking=True) as stream:
        with cupy.cuda.using_allocator(pool.malloc):
            call()  # compiles: a kernel cannot be loaded in a capture
            stream.begin_capture()
            results = call()
            graph = stream.end_capture()

        def replay() -> None:
            graph.launch(stream)
            stream.synchronize()

        yield results, replay


def sent(x: Any) -> Any:
    """Copy arrays to the GPU; leave the rest."""
    import cupy

    if isinstance(x, np.ndarray) and x.dtype == FLOAT8_E4M3FN:  # CuPy copies no such array
        return cupy.asarray(x.view(np.uint8)).view(FLOAT8_E4M3FN)
    return cupy.asarray(x) if isinstance(x, np.ndarray) else x


def bits(results: Any) -> list[bytes]:
    """Return the bytes of the arrays of a result, on the host or on the GPU."""
    return [getattr(x, "get", lambda x=x: x)().tobytes() for x in results if x is not None]


def sent_options(options: dict[str, Any], integers: bool = False) -> dict[str, Any]:
    """Send the arrays of options; those of integers stay on the host unless asked for."""
    stay = "" if integers else "iu"
    made = {
        name: x if isinstance(x, np.ndarray) and x.dtype.kind in stay else sent(x)
        for name, x in options.items()
    }
    return made | {"aux": tuple(map(sent, options["aux"]))} if "aux" in options else made


def host(results: Any) -> Any:
    """Copy what a call returned to the host."""
    made = type(results)(*map(_at_host, results))
    if isinstance(results, Gradients) and results.daux is not None:
        made.daux = tuple(map(_at_host, results.daux))
    return made


def _at_host(x: Any) -> Any:
    return x.get() if hasattr(x, "get") else x


def hold(
    given: Sequence[Any],
    attention: Attention,
    grads: Gradients,
    options: dict[str, Any],
    without: Sequence[str] = (),
) -> None:
    """Compare both passes over q, k, v and dout with the oracle.

    Gradients that ``without`` names, such as ``daux``, must be None.
    """
    q, k, v, dout = map(_at_host, given)
    there = {name: _at_host(x) for name, x in options.items()}
    if "aux" in options:
        there["aux"] = tuple(map(_at_host, options["aux"]))
    bounds = error_bound(q, k, v, dout, **there)
    assert_attention_close(host(attention), reference.forward(q, k, v, **there), bounds)
    expected = reference.backward(dout, q, k, v, **there)
    expected = expected._replace(**dict.fromkeys(without))
    assert_attention_close(host(grads), expected, bounds)


def check(
    given: Sequence[Any], options: dict[str, Any], without: Sequence[str] = (), **asked: Any
) -> tuple[Attention, Gradients]:
    """Send arrays, call both passes and compare them with the oracle; inputs keep their bits.

    ``without`` is that of ``hold``; ``asked`` are arguments of the backward pass alone.
    """
    q, k, v, dout = there = [sent(x) for x in given]
    before, more = bits(there), sent_options(options)
    with poisoned():
        attention = tileattn.forward(q, k, v, **more)
        grads = tileattn.backward(dout, q, k, v, attention.out, attention.lse, **asked, **more)
    assert bits(there) == before
    hold(given, attention, grads, options, without)
    return attention, grads


poisoned = cupy_pool
"""Otherwise an array may hold the right results of an earlier call."""
