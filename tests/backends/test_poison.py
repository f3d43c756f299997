"""No result depends on what memory held before: every buffer is written before it is read."""

from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests import poison
from tileattn.backends.llvm import execute
from tileattn.backends.numpy.memory import borrowed_scratch

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)
NQ, NK = 150, 261  # an odd distance: tiles that end with a block of 128 begin within a pair
OPTIONS: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"window": (36, 4)},
    {"kv_lengths": [157, 231], "causal": True, "window": (34, None)},
    {"softcap": 3.0, "dropout_p": 0.3, "q_offset": 21, "causal": True},
    {},
)

pytestmark = pytest.mark.usefixtures("poison")


def test_the_mode_fills_every_buffer() -> None:
    """Also those that are used again."""
    for order in ("C", "F"):
        assert np.isnan(np.empty((3, 4), np.float16, order)).all()
    assert (np.empty_like([1, 2]) == -1).all()
    assert np.empty((), ml_dtypes.bfloat16) != 0
    with borrowed_scratch() as scratch:
        for _ in range(2):
            x = scratch.take("a", (2, 3), np.dtype(np.float32))
            assert np.isnan(x).all()
            x[...] = 1
    lent: Any = execute._Scratch(64)  # which the poison mode replaces
    for _ in range(2):
        start = lent.address - lent._memory.ctypes.data
        assert (lent._memory[start : start + 64] == poison.BYTE).all()
        lent._memory[start : start + 64] = 1
    lent._memory[start + 128] = 1
    with pytest.raises(AssertionError, match="more scratch memory"):
        lent.check()


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize(
    "dtype",
    [x if x == np.float32 else pytest.param(x, marks=pytest.mark.slow) for x in DTYPES],
    ids=lambda x: x.__name__,
)
def test_no_bit_of_any_head_dimension_depends_on_memory(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    dimensions = [*range(1, 33), *range(33, 257, 7), *range(48, 257, 16)]
    for D, options in zip(dimensions, cycle(OPTIONS), strict=False):
        Dv = int(rng.integers(1, 257)) if D % 3 else D
        shapes = (2, 2, NQ, D), (2, 1, NK, D), (2, 1, NK, Dv), (2, 2, NQ, Dv)
        q, k, v, dout = (rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes)
        found = []
        for byte in (0, 0xFF):
            monkeypatch.setattr(poison, "BYTE", byte)
            attention = tileattn.forward(q, k, v, **options)
            grads = tileattn.backward(dout, q, k, v, *attention, **options)
            found.append([*attention, *grads[:3]])
        for zeroed, filled in zip(*found, strict=True):
            assert not np.isnan(filled.astype(np.float32)).any(), (D, Dv, options)
            assert filled.tobytes() == zeroed.tobytes(), (D, Dv, options)


@pytest.mark.usefixtures("cpu_backend")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)
@pytest.mark.parametrize("Nq", [1, 9])
def test_no_bit_of_decoding_packed_or_paged_calls_does(
    dtype: Any, Nq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(Nq)
    for D, Dv in ((80, 48), (33, 112)):
        cache = [rng.standard_normal((40, 2, 16, n), np.float32).astype(dtype) for n in (D, Dv)]
        q = rng.standard_normal((2, 4, Nq, D), np.float32).astype(dtype)
        table = rng.permutation(40)[:36].reshape(2, 18)
        paged: dict[str, Any] = {"block_table": table, "kv_lengths": [277, 61], "causal": True}
        ends = {"cu_seqlens_q": [0, Nq, 2 * Nq], "cu_seqlens_k": [0, 101, 133]}
        packed: dict[str, Any] = {**ends, "causal": True}
        rows = [x.transpose(1, 0, 2, 3).reshape(1, 2, 640, -1)[:, :, :133] for x in cache]
        flat = q.transpose(1, 0, 2, 3).reshape(1, 4, 2 * Nq, D)
        found = []
        for byte in (0, 0xFF):
            monkeypatch.setattr(poison, "BYTE", byte)
            of_pages = tileattn.forward(q, *cache, **paged)
            of_tokens = tileattn.forward(flat, *rows, **packed)
            given = of_tokens.out, flat, *rows, *of_tokens
            grads = tileattn.backward(*given, **packed)
            found.append([*of_pages, *of_tokens, *grads[:3]])
        for zeroed, filled in zip(*found, strict=True):
            assert not np.isnan(filled.astype(np.float32)).any(), (D, Dv)
            assert filled.tobytes() == zeroed.tobytes(), (D, Dv)
