"""Bounds and blocks of random functions, against all of their values."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expressions.random_functions import AUX, HQ, NK, NQ, B, as_function, drawn
from tileattn.expressions.build import FUNCTIONS
from tileattn.expressions.evaluate import evaluate
from tileattn.expressions.extrema import RangeExtrema
from tileattn.expressions.functions import mask_expression, score_expression
from tileattn.expressions.intervals import ROUNDED, bounds, may_be_negative
from tileattn.expressions.nodes import Node, elements
from tileattn.expressions.quadtree import find_blocks
from tileattn.kernels.cuda.families.cuda_text import functions_text

SIZES = {"b": B, "h": HQ, "i": NQ, "j": NK}
EXTREMA = [RangeExtrema(x) for x in AUX]
FLOAT64 = np.dtype(np.float64)


def values(node: Node, ranges: dict[str, tuple[int, int]], dtype: Any = FLOAT64) -> Any:
    """Evaluate an expression at all indices of some ranges, their ends included."""
    grid = np.ogrid[tuple(slice(a, b + 1) for a, b in ranges.values())]
    inputs = dict(zip(ranges, grid, strict=True))
    with np.errstate(all="ignore"):
        return evaluate([node], inputs, AUX, dtype)[0]


def some_range(data: Any, n: int) -> tuple[int, int]:
    first = data.draw(st.integers(0, n - 1))
    return first, data.draw(st.integers(first, n - 1))


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", "fib")
@settings(max_examples=100)
@given(data=st.data())
def test_bounds_hold_all_values(data: Any, kind: str, dtype: Any) -> None:
    function = as_function(drawn(data.draw, kind, data.draw(st.integers(1, 5)), False), False)
    expression = mask_expression if kind == "b" else score_expression
    node = expression(_with_s(function) if kind != "b" else function, AUX)
    node = node.inputs[0] if kind == "i" and node.op == "cast" else node
    ranges = {name: some_range(data, n) for name, n in SIZES.items()}
    known = data.draw(st.booleans())
    found = bounds(node, ranges, EXTREMA if known else [None] * 4, np.dtype(dtype))
    low, high = (float(x) for x in found)
    everything = values(node, ranges, np.dtype(dtype))
    if not np.isnan(low):
        assert np.isfinite(everything).all()
        assert (everything >= low).all()
        assert (everything <= high).all()


def _with_s(function: Any) -> Any:
    return lambda _s, *more: function(*more)


def test_bounds_of_what_masks_are_made_of_are_exact() -> None:
    def exact(function: Any, first: Any, last: Any) -> tuple[float, float]:
        node = mask_expression(function, AUX)
        ranges = dict(zip("bhij", zip(first, last, strict=True), strict=True))
        low, high = bounds(node, ranges, EXTREMA, FLOAT64)
        return float(low), float(high)

    inside = (0, 0, 4, 2), (0, 0, 6, 3)
    assert exact(lambda _b, _h, i, j, *_: i >= j, *inside) == (1, 1)
    assert exact(lambda _b, _h, i, j, *_: i - j > 4, *inside) == (0, 0)
    assert exact(lambda _b, _h, i, j, *_: i - j > 3, *inside) == (0, 1)
    assert exact(lambda _b, _h, i, j, *_: i // 8 == j // 8, *inside) == (1, 1)
    assert exact(lambda _b, _h, i, j, *_: abs(i % 8 - j % 8) < 5, *inside) == (1, 1)
    assert exact(lambda _b, _h, i, j, *_: np.floor(i / 2) >= 2, *inside) == (1, 1)
    assert exact(lambda _b, _h, i, j, *a: a[2][j] <= AUX[2][2:4].max(), *inside) == (1, 1)
    assert exact(lambda _b, _h, i, j, *a: a[2][j] < AUX[2][2:4].min(), *inside) == (0, 0)
    assert exact(lambda _b, _h, i, j, *a: a[2][j - NK] <= AUX[2][2:4].max(), *inside) == (1, 1)
    assert exact(lambda _b, _h, i, j, *a: a[2][j - NK] < AUX[2][2:4].min(), *inside) == (0, 0)
    assert exact(lambda _b, _h, i, j, *a: a[2][j - 3] <= AUX[2].max(), *inside) == (1, 1)
    assert exact(lambda _b, _h, i, j, *a: a[2][j - 3] < AUX[2][[-1, 0]].max(), *inside) == (0, 1)
    assert exact(lambda _b, _h, i, j, *_: (i ^ j) < 8, *inside) == (1, 1)
    assert exact(lambda _b, _h, i, j, *_: i << 70 == 0, *inside) == (0, 1)


def test_every_operation_has_bounds() -> None:
    """None is evaluated at the ends of its inputs that is not monotone."""
    from tileattn.expressions import intervals

    monotone = {"add", "subtract", "multiply", "negative", "sign", "minimum", "maximum", "sqrt"}
    assert FUNCTIONS.keys() - intervals._RULES.keys() == monotone | {"floor", "ceil", "rint"}


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", [*ROUNDED, "power"])
def test_bounds_leave_room_for_libraries_that_round_otherwise(name: str, dtype: Any) -> None:
    """By two units in the last place on each side, also at a single point."""
    more = (1.3,) if name == "power" else ()
    x = np.array([1e-3, 0.3, 0.7, 1.5, 2.5, 9.0], dtype)
    node = score_expression(lambda s, b, h, i, j, x: x.named(name, x, *more), (x[0],))
    for one in x:
        low, high = bounds(node, {}, [RangeExtrema(np.array(one))], np.dtype(dtype))
        value = FUNCTIONS[name](np.float64(one), *more).astype(dtype)
        room = 2 * np.spacing(abs(value))
        assert low <= value - room
        assert high >= value + room


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (lambda b, h, i, j, *_: i + 2 * j + h + b, False),
        (lambda b, h, i, j, *_: abs(i - j), False),
        (lambda b, h, i, j, *_: np.clip(i - j, -16, 16) + 16, False),
        (lambda b, h, i, j, *_: (i - j) % 7, False),
        (lambda b, h, i, j, *_: np.sqrt(1.0 * i).astype(int), False),
        (lambda b, h, i, j, *_: i - j, True),
        (lambda b, h, i, j, *_: i - 1, True),
        (lambda b, h, i, j, *aux: aux[2][j], True),
        (lambda b, h, i, j, *_: (2 * np.sin(1.0 * i)).astype(int), True),
    ],
)
def test_only_indices_that_may_be_negative_count_from_the_end(index: Any, expected: bool) -> None:
    node = score_expression(lambda s, b, h, i, j, *aux: s + aux[2][index(b, h, i, j, *aux)], AUX)
    read = elements(node)[-1]
    assert may_be_negative(read.inputs[0], FLOAT64) is expected
    text = functions_text(node, None, tuple((x.dtype.name, x.ndim) for x in AUX), FLOAT64)
    assert ("numpy::from_start(" in text) is expected


@given(data=st.data())
def test_extrema_of_ranges(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)))
    array = np.random.default_rng(0).integers(-99, 99, shape)
    ranges = [[some_range(data, n) for n in shape] for _ in range(4)]
    first, last = np.array(ranges).transpose(2, 1, 0)
    low, high = RangeExtrema(array).bounds(first, last)
    for n, one in enumerate(ranges):
        part = array[tuple(slice(a, b + 1) for a, b in one)]
        assert (low[n], high[n]) == (part.min(), part.max())


def test_extrema_of_an_array_without_axes() -> None:
    assert [*map(float, RangeExtrema(np.array(3.5)).bounds([], []))] == [3.5, 3.5]


@settings(max_examples=200)
@given(data=st.data())
def test_blocks_cover_what_is_visible(data: Any) -> None:
    function = as_function(drawn(data.draw, "b", data.draw(st.integers(1, 4)), False), False)
    node = mask_expression(function, AUX)
    size = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    b, heads = data.draw(st.integers(0, B - 1)), some_range(data, HQ)
    runs = find_blocks(node, EXTREMA, b, heads, (NQ, NK), size)
    ranges = {"b": (b, b), "h": heads, "i": (0, NQ - 1), "j": (0, NK - 1)}
    visible = np.broadcast_to(values(node, ranges)[0], (heads[1] - heads[0] + 1, NQ, NK))
    kinds = np.zeros((-(-NQ // size[0]), -(-NK // size[1])), int)
    for row, first, stop, kind in zip(*runs, strict=True):
        assert not kinds[row, first:stop].any()
        kinds[row, first:stop] = kind
    for (row, column), kind in np.ndenumerate(kinds):
        rows, columns = (slice(n * x, n * x + x) for n, x in zip((row, column), size, strict=True))
        part = visible[:, rows, columns]
        assert kind == 1 or part.all() == part.any() == (kind == 2)


def test_long_masks_are_found_without_a_look_at_all_blocks() -> None:
    """A million queries and keys have 61 million blocks; documents leave 16 thousand runs."""
    N = 1 << 20
    document = np.arange(N) // 700
    node = mask_expression(lambda _b, _h, i, j, d: (d[i] == d[j]) & (i >= j), (document,))
    runs = find_blocks(node, [RangeExtrema(document)], 0, (0, 0), (N, N), (128, 128))
    blocks = int((runs.stop - runs.first).sum())
    assert N // 128 <= len(runs.row) <= blocks < 8 * (N // 128)
