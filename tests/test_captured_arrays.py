"""Arrays that functions capture join ``aux``: they compute what they would as parameters."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import normal
from tileattn.expressions.functions import mask_expression
from tileattn.testing import assert_attention_close, error_bound

B, HQ, HKV, NQ, NK, D, DV = SIZES = (2, 4, 2, 19, 23, 5, 7)
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 3, NK)
TABLE = RNG.normal(size=(HQ, NQ + NK))

pytestmark = pytest.mark.usefixtures("cpu_backend")


def by_global(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + TABLE[h, i - j]


def by_default(s: Any, b: Any, h: Any, i: Any, j: Any, *, table: Any = TABLE) -> Any:
    return s + table[h][i - j]


def by_helper(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return by_global(s, b, h, i, j)


def by_closure(table: Any) -> Any:
    return lambda s, b, h, i, j: s + table[h, i - j]


def by_slice(table: Any) -> Any:
    """Read parts and sizes of an array as NumPy has them."""
    last = table.shape[0] - 1
    return lambda s, b, h, i, j: s + np.where(h == last, table[last][i - j], table[:last][h, i - j])


class Layer:
    def score_mod(self, s: Any, _b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + TABLE[h, i - j]


FUNCTIONS: dict[str, Any] = {
    "global": by_global,
    "default": by_default,
    "helper": by_helper,
    "closure": by_closure(TABLE),
    "nested": lambda *given: 1.0 * by_closure(TABLE)(*given),
    "slice": by_slice(TABLE),
    "partial": partial(by_default),
    "method": Layer().score_mod,
}


def with_aux(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, i - j]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_captured_arrays_are_parameters(name: str) -> None:
    q, k, v, dout = normal(SIZES, np.float64)
    attention, pullback = tileattn.vjp(q, k, v, score_mod=FUNCTIONS[name])
    expected, back = tileattn.vjp(q, k, v, score_mod=with_aux, aux=(TABLE,))
    np.testing.assert_array_equal(attention.out, expected.out)
    options = {"score_mod": FUNCTIONS[name]}
    bounds = error_bound(q, k, v, dout, **options)
    oracle = tileattn.reference.forward(q, k, v, **options)
    assert_attention_close(attention, oracle, bounds)
    assert_attention_close(
        pullback(dout), tileattn.reference.backward(dout, q, k, v, **options), bounds
    )
    grads, others = pullback(dout), back(dout)
    np.testing.assert_array_equal(grads.dq, others.dq)
    assert grads.daux is not None
    assert others.daux is not None
    if name != "slice":  # the gradients of its parts are apart
        np.testing.assert_array_equal(grads.daux[0], others.daux[0])


def test_captured_arrays_come_behind_those_of_aux() -> None:
    q, k, v, dout = normal(SIZES, np.float64)
    weights = RNG.normal(size=HQ)
    options: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j, w: s * w[h] + TABLE[h, i - j],
        "mask_mod": lambda b, h, i, j, w: (IDS[j] == IDS[i]) | (TABLE[h, j] > w[h]),
        "aux": (weights,),
    }
    out, lse = tileattn.forward(q, k, v, **options)
    grads = tileattn.backward(dout, q, k, v, out, lse, **options)
    as_aux: dict[str, Any] = {
        "score_mod": lambda s, b, h, i, j, w, t, n: s * w[h] + t[h, i - j],
        "mask_mod": lambda b, h, i, j, w, t, n: (n[j] == n[i]) | (t[h, j] > w[h]),
        "aux": (weights, TABLE, IDS),
    }
    np.testing.assert_array_equal(out, tileattn.forward(q, k, v, **as_aux).out)
    expected = tileattn.backward(dout, q, k, v, out, lse, **as_aux)
    assert grads.daux is not None
    assert len(grads.daux) == 3
    for one, other in zip(grads.daux, expected.daux or (), strict=True):
        np.testing.assert_array_equal(one, other)


def test_another_array_or_other_elements_count_at_the_next_call() -> None:
    q, k, v, _ = normal(SIZES, np.float64)
    ids = IDS.copy()

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return ids[i] == ids[j]

    def out() -> Any:
        return tileattn.forward(q, k, v, mask_mod=mask_mod).out

    first = out()
    ids[:] = 0
    changed = out()
    np.testing.assert_array_equal(changed, tileattn.forward(q, k, v).out)
    ids = IDS.copy()
    np.testing.assert_array_equal(out(), first)
    assert (first != changed).any()


def test_numbers_of_arrays_are_constants() -> None:
    q, k, v, _ = normal(SIZES, np.float64)
    width = np.array(5)
    widths = np.array([3, 5])
    expected = tileattn.forward(q, k, v, mask_mod=lambda b, h, i, j: i - j < 5).out
    for function in (
        lambda b, h, i, j: i - j < width,
        lambda b, h, i, j: i - j < widths[1],
        lambda b, h, i, j: i - j < widths.max(),
        lambda b, h, i, j: i - j < len(widths) + 3,
    ):
        np.testing.assert_array_equal(tileattn.forward(q, k, v, mask_mod=function).out, expected)


def test_what_cannot_be_captured_says_how() -> None:
    class Holder:
        ids = IDS

    q, k, v, _ = normal(SIZES, np.float64)
    with pytest.raises(TypeError, match=r"pass arrays as aux=\(array, ...\) and index them inside"):
        tileattn.forward(q, k, v, mask_mod=lambda b, h, i, j: Holder.ids[i] == Holder.ids[j])
    message = r"^mask_mod indexes `IDS`, an array of dtype int64 .* pass aux=\(IDS,\) and add the"
    with pytest.raises(TypeError, match=message):
        mask_expression(lambda b, h, i, j: IDS[i] == IDS[j], ())
    words = np.array(["a", "b"])
    with pytest.raises(TypeError, match=r"^mask_mod indexes `words`, an array of dtype <U1"):
        tileattn.forward(q, k, v, mask_mod=lambda b, h, i, j: words[i] == words[j])
    with pytest.raises(TypeError, match=r"^score_mod must compute with elements of an array"):
        tileattn.forward(q, k, v, score_mod=lambda s, b, h, i, j: s + TABLE)


class Derived(np.ndarray[Any, Any]):
    """Another class of NumPy's arrays, as that of a mapped file is."""


@pytest.mark.parametrize("kind", [np.ndarray, Derived])
def test_arrays_of_any_class_compute_outside_of_the_indices(kind: Any) -> None:
    q, k, v, _ = normal(SIZES, np.float64)
    w = np.arange(1.0, HQ + 1).view(kind)
    expected = tileattn.forward(q, k, v, score_mod=lambda s, b, h, i, j: s * 2 + (h + 1)).out
    for score_mod in (
        lambda s, b, h, i, j: s * (w * 2)[0] + w[h],
        lambda s, b, h, i, j: s * (sum(w) / 5) + w[h],
        lambda s, b, h, i, j: s * w[1] + (w * 1)[h],
        lambda s, b, h, i, j: s * float(w[1]) + w[h],
    ):
        found = tileattn.forward(q, k, v, score_mod=score_mod).out
        np.testing.assert_array_equal(found, expected)


def test_the_oracle_names_an_array_that_a_function_computes() -> None:
    q, k, v, _ = normal(SIZES, np.float64)
    w = np.arange(1.0, HQ + 1)
    with pytest.raises(TypeError, match=r"computes from `w`; it must be computed outside"):
        tileattn.reference.forward(q, k, v, score_mod=lambda s, b, h, i, j: s + (w * 2)[h])
