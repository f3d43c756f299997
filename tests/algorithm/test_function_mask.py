"""Tiles of a mask that is a function, in both orders of the loops, by brute force."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tileattn
from examples import score_functions as gallery
from tests.expressions.random_functions import AUX, HQ, NK, NQ, B, as_function, drawn
from tests.gallery import calls
from tileattn import BlockMask
from tileattn.algorithm.function_mask import FunctionMask, extrema
from tileattn.algorithm.heads import head_groups
from tileattn.algorithm.mask import AttentionMask, SlidingWindow, schedule
from tileattn.algorithm.tiles import Tile
from tileattn.call.block_mask import EMPTY, FULL, PARTIAL
from tileattn.call.parse import parse
from tileattn.expressions import quadtree
from tileattn.expressions.functions import mask_expression

PLACE = np.ogrid[:B, :HQ, :NQ, :NK]
WINDOWS = [
    SlidingWindow(NQ, NK, 0, None, None),
    SlidingWindow(NQ, NK, 2, None, 0),
    SlidingWindow(NQ, NK - 3, -1, 3, 2),
    SlidingWindow(NQ, 0, 0, None, None),
]


def made(data: Any, block: int) -> tuple[FunctionMask, Any]:
    """Draw a function, and evaluate it on all pairs."""
    function = as_function(drawn(data.draw, "b", data.draw(st.integers(1, 4)), False), False)
    mask = FunctionMask(mask_expression(function, AUX), AUX, block)
    with np.errstate(all="ignore"):
        return mask, np.broadcast_to(mask.visible(*PLACE), (B, HQ, NQ, NK))


@settings(max_examples=200)
@given(data=st.data())
def test_tiles_cover_what_is_visible_once(data: Any) -> None:
    function, pairs = made(data, data.draw(st.integers(1, 6)))
    b, first = data.draw(st.integers(0, B - 1)), data.draw(st.integers(0, HQ - 1))
    heads = slice(first, data.draw(st.integers(first + 1, HQ)))
    window = data.draw(st.sampled_from(WINDOWS))
    visible = pairs[b, heads] & window.visible(np.arange(NQ)[:, None], np.arange(NK))
    other = None
    if data.draw(st.booleans()):
        shape = (1, HQ, NQ, NK)
        other = BlockMask.from_predicate(lambda _, h, i, j: i % 5 > (j + h) % 3, shape, (3, 2))
        visible = visible & other.to_dense(shape)[0, heads]
    mask = AttentionMask(window, NK, None, other, b, heads, function)
    block_q, block_k = data.draw(st.integers(1, NQ)), data.draw(st.integers(1, NK))
    for order in ("q", "kv"):
        times = np.zeros((NQ, NK), int)
        for tile in schedule(mask, block_q, block_k, order):
            assert tile.kind in (PARTIAL, FULL)
            times[tile.queries, tile.keys] += 1
            part = visible[:, tile.queries, tile.keys]
            assert tile.kind == PARTIAL or part.all()
            with np.errstate(all="ignore"):
                np.testing.assert_array_equal(np.broadcast_to(mask.visible(tile), part.shape), part)
            assert mask.kind(*tile[:4]) in (tile.kind, PARTIAL)
        assert times.max(initial=0) <= 1
        assert not visible[:, times == 0].any()


@given(data=st.data())
def test_blocks_decided_all_at_once_are_those_of_the_quadtree(data: Any) -> None:
    function = as_function(drawn(data.draw, "b", data.draw(st.integers(1, 4)), False), False)
    visible, size = mask_expression(function, AUX), data.draw(st.integers(1, 5))
    given = visible, (B, HQ, NQ, NK), (size, size + 1), extrema(visible, AUX)
    found = quadtree.kinds_by_intervals(*given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quadtree, "START", 0)
        np.testing.assert_array_equal(found, quadtree.kinds_by_intervals(*given))


@given(data=st.data())
def test_kinds_of_any_tile(data: Any) -> None:
    function, pairs = made(data, data.draw(st.integers(1, 4)))
    mask = AttentionMask(WINDOWS[0], NK, None, None, 1, slice(0, HQ), function)
    q0, k0 = data.draw(st.integers(0, NQ - 1)), data.draw(st.integers(0, NK - 1))
    q1, k1 = data.draw(st.integers(q0 + 1, NQ)), data.draw(st.integers(k0 + 1, NK))
    part, kind = pairs[1, :, q0:q1, k0:k1], mask.kind(q0, q1, k0, k1)
    assert kind == PARTIAL or part.all() == part.any() == (kind == FULL)


@pytest.mark.parametrize(
    ("name", "most"),
    [("sliding_window", 0.5), ("documents", 0.8), ("neighbourhood", 0.5), ("scattered", 1.0)],
)
def test_explain_counts_the_tiles_of_the_schedule(name: str, most: float) -> None:
    x = np.zeros((2, 4, 3000, 8), np.float32)
    call = calls(2, 4, 3000, 3000)[name]
    tiles = tileattn.explain(x, x, x, backend="numpy", **call).tiles
    problem, operands = parse(x, x, x, call)
    found: list[Tile] = []
    for heads in head_groups(problem, operands):
        each = heads.q_heads.stop - heads.q_heads.start
        found += each * list(schedule(heads.mask, 384, 1024))
    kinds = Counter(tile.kind for tile in found)
    assert (tiles["partial"], tiles["full"]) == (kinds[PARTIAL], kinds[FULL])
    visited = 2 * 4 * 8 * 3 - tiles["skipped"]
    assert 0 < visited <= most * 2 * 4 * 8 * 3


def test_time_goes_with_the_visible_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 131072 tokens in documents the schedule evaluates no pairs, and lists few tiles."""
    N = 131072
    document = np.arange(N)[None] // 700
    monkeypatch.setattr(FunctionMask, "visible", None)
    node = mask_expression(lambda b, _, i, j, d: (d[b, i] == d[b, j]) & (i >= j), (document,))
    function = FunctionMask(node, (document,))
    mask = AttentionMask(SlidingWindow(N, N, 0, None, None), N, function=function)
    tiles = list(schedule(mask, 384, 1024))
    assert N // 384 < len(tiles) < 20 * (N // 384)
    assert sum((x.q1 - x.q0) * (x.k1 - x.k0) for x in tiles) < 1200 * N


def test_the_same_blocks_for_heads_that_do_not_differ() -> None:
    node = mask_expression(lambda b, _, i, j: i >= j + b, ())
    mask, window = FunctionMask(node, ()), WINDOWS[0]
    first = mask.blocks(window, NK, 0, slice(0, 1))
    assert mask.blocks(window, NK, 0, slice(1, 3)) is first
    assert mask.blocks(window, NK, 1, slice(0, 1)) is not first


# --- a BlockMask from a function that is traced -------------------------------------------------


PREDICATES = [
    gallery.sliding_window,
    gallery.dilated_window,
    gallery.local_and_global,
    gallery.neighbourhood,
    gallery.scattered,
    lambda b, h, i, _j: (i + b) % 3 < h,
    lambda b, _h, _i, j: (j > 3) & (b == 1),
    lambda *_: True,
]


@given(predicate=st.sampled_from(PREDICATES), size=st.tuples(*[st.integers(1, 60)] * 2))
def test_a_block_mask_of_a_traced_predicate_is_exact(predicate: Any, size: Any) -> None:
    shape = (B, HQ, 45, 58)
    mask = BlockMask.from_predicate(predicate, shape, size)
    pairs = np.broadcast_to(predicate(*np.ogrid[tuple(map(slice, shape))]), shape)
    np.testing.assert_array_equal(mask.to_dense(shape), pairs)
    for (b, h, row, column), kind in np.ndenumerate(mask.kinds):
        rows, columns = (slice(n * x, n * x + x) for n, x in zip((row, column), size, strict=True))
        part = pairs[b, h, rows, columns]
        assert kind == (FULL if part.all() else PARTIAL if part.any() else EMPTY)


PAIRS = [np.random.default_rng(n).random((2, 1, 9, 11)) < 0.6 for n in (0, 1)]


def test_masks_are_combined() -> None:
    one, other = (BlockMask.from_mask(x[:m], (2, 3)) for x, m in zip(PAIRS, (2, 1), strict=True))
    shape = (2, 1, 9, 11)
    dense = one.to_dense(shape), other.to_dense(shape)
    for mask, expected in (
        (one & other, dense[0] & dense[1]),
        (one | other, dense[0] | dense[1]),
        (~one, ~dense[0]),
        (~(one & ~other) | other, ~(dense[0] & ~dense[1]) | dense[1]),
    ):
        np.testing.assert_array_equal(mask.to_dense(shape), expected)
        exact = BlockMask.from_mask(expected, (2, 3))
        np.testing.assert_array_equal(np.broadcast_to(mask.kinds, exact.kinds.shape), exact.kinds)
    blocks = BlockMask(np.eye(5, 4, dtype=bool), (2, 3))
    assert (blocks & ~blocks).density == 0
    np.testing.assert_array_equal(
        (blocks & one).to_dense(shape), blocks.to_dense(shape) & one.to_dense(shape)
    )


def test_what_is_not_combined() -> None:
    mask = BlockMask.from_mask(PAIRS[0], (2, 3))
    with pytest.raises(ValueError, match=r"^the masks of & must have blocks of one size; got "):
        mask & BlockMask.from_mask(PAIRS[1], (3, 3))
    for other in (PAIRS[1][..., :10], PAIRS[1][..., :9], PAIRS[1][[0, 1, 1]]):
        with pytest.raises(ValueError, match=r"^the masks of [&|] must fit one problem; "):
            mask | BlockMask.from_mask(other, (2, 3))
    with pytest.raises(TypeError, match="unsupported operand"):
        mask & 1  # type: ignore[operator]  # wrong on purpose
