"""Packed sequences and caches in pages: nothing beside the arrays is touched."""

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

import tileattn
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]
Guarded = Callable[[Array, bool], Array]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="mprotect is of POSIX")

DTYPES = [
    *(
        pytest.param(x, marks=pytest.mark.slow)
        for x in (np.float16, ml_dtypes.bfloat16, np.float64)
    ),
    np.float32,
]


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)
def test_packed_sequences(guarded: Guarded, dtype: Any, at_end: bool) -> None:
    """The last sequence ends where the arrays do, and the first one starts there."""
    starts = {"cu_seqlens_q": [0, 70, 71, 75, 116], "cu_seqlens_k": [0, 50, 190, 190, 233]}
    rng = np.random.default_rng(0)
    shapes = (4, 116, 40), (2, 233, 40), (2, 233, 24), (4, 116, 24)
    q, k, v, dout = (guarded(rng.normal(size=x).astype(dtype), at_end) for x in shapes)
    out = guarded(np.empty((4, 116, 24), dtype), at_end)
    options: dict[str, Any] = {"causal": True, "backend": "llvm", **starts}
    expected = tileattn.forward(q.copy(), k.copy(), v.copy(), **options)
    attention = tileattn.forward(q, k, v, out=out, **options)
    np.testing.assert_array_equal(attention.lse, expected.lse)
    lse = guarded(attention.lse, at_end)
    grads = tileattn.backward(dout, q, k, v, out, lse, **options)
    assert all(np.isfinite(x.astype(float)).all() for x in grads[:3])


@pytest.mark.parametrize("at_end", [True, False])
@pytest.mark.parametrize("Nq", [2, 40])
@pytest.mark.parametrize("page", [1, 16, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: x.__name__)
def test_pages(guarded: Guarded, dtype: Any, page: int, Nq: int, at_end: bool) -> None:
    """Keys end with the last row of the last page, and start with the first one of the first."""
    lengths = [3 * page, 2 * page + 1]
    table = guarded(np.array([[0, 3, 5], [1, 4, 2]], np.int64), at_end)
    rng = np.random.default_rng(1)
    shapes = (2, 4, Nq, 40), (6, 2, page, 40), (6, 2, page, 24)
    q, k, v = (guarded(rng.normal(size=x).astype(dtype), at_end) for x in shapes)
    found = tileattn.forward(q, k, v, block_table=table, kv_lengths=lengths, backend="llvm")
    dense = [x[table].swapaxes(1, 2).reshape(2, 2, 3 * page, -1) for x in (k, v)]
    expected = reference.forward(q, *dense, kv_lengths=lengths)
    assert_attention_close(found, expected, error_bound(q, *dense, kv_lengths=lengths))
