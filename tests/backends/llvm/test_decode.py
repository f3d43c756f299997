"""The decoding kernel: which calls it runs, its splits, and that it reads visible keys alone."""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

import tileattn
from tests.arrays import normal
from tileattn import reference
from tileattn.backends import registry, threads
from tileattn.backends.llvm.backend import LlvmBackend
from tileattn.backends.llvm.tasks import splits
from tileattn.call.parse import parse
from tileattn.kernels.llvm.sizes import SPLIT
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]
SIZES = (1, 8, 2, 1, 3 * SPLIT + 77, 72, 40)  # several splits, the last of several tiles
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lengths": {"kv_lengths": [2 * SPLIT + 1]},
    "window": {"window": (SPLIT, 0)},
    "sinks, softcap, ALiBi": {
        **{"sinks": np.linspace(-1, 2, 8), "softcap": 3.0},
        **{"alibi_slopes": np.linspace(0, 0.1, 8)},
    },
    "dropout": {"dropout_p": 0.3, "seed": 7},
}


@pytest.fixture(params=["decode", "forward"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """A backend with one of the forward kernels."""

    class One(LlvmBackend):
        name = "one_kernel"

    registry.register_backend(One(kernel=request.param))
    yield One.name
    registry._loaded.pop(One.name)


@pytest.mark.parametrize("chosen", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_splits_are_merged(chosen: dict[str, Any], dtype: Any) -> None:
    q, k, v, dout = normal(SIZES, dtype)
    attention = tileattn.forward(q, k, v, backend="llvm", **chosen)
    bounds = error_bound(q, k, v, dout, **chosen)
    assert_attention_close(attention, reference.forward(q, k, v, **chosen), bounds)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_number_of_workers_gives_the_same_bits(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, _ = normal((2, 8, 2, 2, 9 * SPLIT + 5, 64, 64))
    expected = tileattn.forward(q, k, v, causal=True, backend="llvm")
    monkeypatch.setattr(threads, "worker_count", lambda: workers)
    threads._crew.cache_clear()
    for _ in range(5):
        found = tileattn.forward(q, k, v, causal=True, backend="llvm")
        np.testing.assert_array_equal(found.out, expected.out)
        np.testing.assert_array_equal(found.lse, expected.lse)
    threads._crew.cache_clear()


def test_an_entry_has_the_same_bits_in_any_batch() -> None:
    lengths = [5, 2 * SPLIT + 9, 3 * SPLIT]
    q, k, v, _ = normal((3, *SIZES[1:]))
    together = tileattn.forward(q, k, v, kv_lengths=lengths, backend="llvm")
    for b, length in enumerate(lengths):
        entry = (x[b : b + 1] for x in (q, k[:, :, : length + b], v[:, :, : length + b]))
        alone = tileattn.forward(*entry, kv_lengths=[length], backend="llvm")
        np.testing.assert_array_equal(alone.out[0], together.out[b])
        np.testing.assert_array_equal(alone.lse[0], together.lse[b])


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect is of POSIX")
@pytest.mark.parametrize(
    ("chosen", "visible"),
    [
        ({"kv_lengths": [20]}, (0, 20)),
        ({"causal": True, "q_offset": 20}, (0, 22)),
        ({"window": (4, 0), "kv_lengths": [20]}, (14, 20)),
        ({"window": (0, 3), "q_offset": [-2]}, (0, 3)),
        ({"kv_lengths": [0]}, (0, 0)),
    ],
)
def test_keys_that_nobody_attends_to_are_not_read(
    kernel: str, chosen: dict[str, Any], visible: tuple[int, int]
) -> None:
    """Each key and each value has a page of its own; reading a protected one ends the process."""
    Nk, D = 24, mmap.PAGESIZE // 4
    q, *_, dout = normal((1, 1, 1, 2, 1, D, D))
    library, held = ctypes.CDLL(None, use_errno=True), [mmap.mmap(-1, Nk * 4 * D) for _ in "kv"]
    k, v = (np.frombuffer(m, np.float32).reshape(1, 1, Nk, D) for m in held)
    for n, x in enumerate((k, v)):
        x[...] = np.random.default_rng(n).standard_normal(x.shape)
    bounds = error_bound(q, k, v, dout, **chosen)
    expected = reference.forward(q, k, v, **chosen)

    def protect(flags: int) -> None:
        for x in (k, v):
            for hidden in (x[:, :, : visible[0]], x[:, :, visible[1] :]):
                at = ctypes.c_void_p(hidden.ctypes.data)
                assert not hidden.size or not library.mprotect(at, hidden.nbytes, flags)

    protect(0)
    found = tileattn.forward(q, k, v, backend=kernel, **chosen)
    protect(mmap.PROT_READ | mmap.PROT_WRITE)
    assert_attention_close(found, expected, bounds)


@given(
    st.integers(1, 4), st.integers(0, 90), st.integers(0, 90), st.integers(-40, 40),
    st.none() | st.integers(0, 60), st.none() | st.integers(0, 60), st.integers(1, 50),
)  # fmt: skip
def test_there_are_as_many_splits_as_are_reached(
    Nq: int, Nk: int, length: int, offset: int, left: int | None, right: int | None, keys: int
) -> None:
    q, k = np.zeros((1, 1, Nq, 1)), np.zeros((1, 1, Nk, 1))
    options = {"window": (left, right), "kv_lengths": [min(length, Nk)], "q_offset": offset}
    problem, operands = parse(q, k, k, options)[:2]
    p, j = np.arange(Nq)[:, np.newaxis] + offset, np.arange(min(length, Nk))
    low = p - (1e9 if left is None else left)
    high = p + (1e9 if right is None else right)
    reached = np.flatnonzero(((low <= j) & (j <= high)).any(axis=0))
    needed = len(set(range(reached[0] // keys, reached[-1] // keys + 1))) if len(reached) else 1
    found = splits(problem, int(operands.kv_lengths.max()), keys)
    assert found >= needed
    longest = -(-min(length, Nk) // keys)
    assert found <= max(1, longest) + 1
