"""The oracle takes the calls that the library takes, pages too, and refuses the others.

The oracle is compared with itself to a few units in the last place of float64: `error_bound` is
made from the oracle, so it cannot judge it.
"""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import Array
from tests.test_reference import HKV, NK, NQ, B, D, arrays
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"dropout_p": 1.5}, ValueError),
        ({"window": (-1, 0)}, ValueError),
        ({"causal": "abc"}, TypeError),
        ({"is_causal": True}, TypeError),
        ({"kv_lengths": [NK + 1, 0]}, ValueError),
        ({"k": np.zeros((B, HKV, NK, D + 1))}, ValueError),
        ({"k": np.zeros((B, HKV, NK, D), np.float32)}, TypeError),
    ],
)
def test_a_bad_call_is_refused_as_the_library_refuses_it(
    changed: dict[str, Any], error: type[Exception]
) -> None:
    q, k, v, dout = arrays()
    call: dict[str, Any] = {"q": q, "k": k, "v": v, **changed}
    with pytest.raises(error) as theirs:
        tileattn.forward(backend="numpy", **call)
    for refused in (
        lambda: reference.forward(**call),
        lambda: reference.backward(dout, **call),
        lambda: error_bound(**call),
    ):
        with pytest.raises(error) as ours:
            refused()
        assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse"])
def test_gradients_that_do_not_fit_are_named(name: str) -> None:
    q, k, v, dout = arrays()
    call: dict[str, Any] = {"dout": dout, "q": q, "k": k, "v": v}
    with pytest.raises(ValueError, match=f"^{name} must have shape"):
        reference.backward(**call | {name: np.zeros((1, 2))})
    with pytest.raises(TypeError, match=f"^{name} must be a NumPy array; got"):
        reference.backward(**call | {name: [[1.0]]})


# --- pages --------------------------------------------------------------------------------------

PAGE = 3


def pages(x: Array, table: Array) -> Array:
    """Cut the rows of each sequence into the pages of a table; other pages hold NaN."""
    _, H, N, columns = x.shape
    pool = np.full((table.max() + 2, H, PAGE, columns), np.nan)
    for b, h, j in np.ndindex(len(x), H, N):
        pool[table[b, j // PAGE], h, j % PAGE] = x[b, h, j]
    return pool


@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "q_offset": [1, -2]}, {"window": (1, 1), "softcap": 2.0}]
)
@pytest.mark.parametrize("lengths", [[5, 2], [0, 4], [0, 0]])
def test_pages_are_the_keys_that_they_hold(options: dict[str, Any], lengths: list[int]) -> None:
    q, k, v, _ = arrays()
    table = np.array([[3, 0], [2, 5]])
    paged = [pages(x, table) for x in (k, v)]
    table = np.where(np.arange(2) * PAGE < np.array(lengths)[:, None], table, -1)
    call = options | {"kv_lengths": lengths}
    paged_call = call | {"block_table": table.tolist()}
    found = reference.forward(q, *paged, **paged_call)
    expected = reference.forward(q, k, v, **call)
    np.testing.assert_allclose(found.out, expected.out, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(found.lse, expected.lse, rtol=1e-14)
    bounds = error_bound(q, *paged, **paged_call)
    assert_attention_close(tileattn.forward(q, *paged, **paged_call), found, bounds)


def test_packed_queries_over_pages() -> None:
    q, k, v, _ = arrays()
    table = np.array([[3, 0], [2, 5]])
    paged = [pages(x, table) for x in (k, v)]
    both: dict[str, Any] = {"kv_lengths": [4, 2], "causal": True}
    found = reference.forward(q[0], *paged, **both, block_table=table, cu_seqlens_q=[0, 2, NQ])
    for b, rows in enumerate((slice(0, 2), slice(2, NQ))):
        length = both["kv_lengths"][b]
        out, lse = reference.forward(q[0, :, rows], k[b, :, :length], v[b, :, :length], causal=True)
        np.testing.assert_allclose(found.out[:, rows], out, rtol=1e-13)
        np.testing.assert_allclose(found.lse[:, rows], lse, rtol=1e-13)


def test_pages_have_no_gradients() -> None:
    q, k, v, dout = arrays()
    call: dict[str, Any] = {"block_table": [[0], [1]], "kv_lengths": 2}
    for gradients in (
        lambda: reference.backward(dout, q, k, v, **call),
        lambda: error_bound(q, k, v, dout, **call),
    ):
        with pytest.raises(tileattn.UnsupportedError, match="does not support block_table"):
            gradients()
