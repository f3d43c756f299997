"""Ranges, kinds, tiles and schedules against ``visible``, pair by pair."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tileattn.algorithm.mask import (
    AttentionMask,
    SlidingWindow,
    schedule,
)
from tileattn.algorithm.tiles import Tile, cut, cut_between, sizes_for_memory, tile_of
from tileattn.call.block_mask import EMPTY, FULL, PARTIAL, BlockMask

Bools = NDArray[np.bool_]

HEADS = slice(2, 5)
BATCH = 1


@st.composite
def windows(draw: st.DrawFn, longest: int = 24) -> tuple[SlidingWindow, int]:
    """Draw a window and the number of keys there are."""
    Nq, Nk = draw(st.integers(0, longest)), draw(st.integers(0, longest))
    side = st.none() | st.integers(0, 5) | st.integers(0, longest + 3) | st.just(1 << 60)
    length = draw(st.just(Nk) | st.integers(0, Nk))
    offset = draw(st.integers(-longest - 3, longest + 3) | st.just(length - Nq))
    return SlidingWindow(Nq, length, offset, draw(side), draw(side)), Nk


def by_pairs(window: SlidingWindow, Nk: int) -> Bools:
    """Ask ``visible`` about one pair after the other, in Python's integers."""
    pairs = [[bool(window.visible(i, j)) for j in range(Nk)] for i in range(window.Nq)]
    return np.array(pairs, np.bool_).reshape(window.Nq, Nk)


def smallest_range(visible: Any) -> tuple[int, int]:
    where = np.flatnonzero(visible)
    return (int(where[0]), int(where[-1]) + 1) if where.size else (0, 0)


def kind_of(part: Bools) -> int:
    return FULL if part.all() else PARTIAL if part.any() else EMPTY


def ranges(length: int) -> st.SearchStrategy[tuple[int, int]]:
    """Draw a range that is not empty."""
    pairs = st.tuples(st.integers(0, length), st.integers(0, length))
    return pairs.map(lambda p: (min(p), max(p))).filter(lambda p: p[0] < p[1])


# --- the definition -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "rows"),
    [
        (SlidingWindow(3, 4, 1, None, None), ["1111", "1111", "1111"]),
        (SlidingWindow(3, 4, 1, None, 0), ["1100", "1110", "1111"]),
        (SlidingWindow(3, 4, 0, None, 0), ["1000", "1100", "1110"]),
        (SlidingWindow(3, 4, -2, None, 0), ["0000", "0000", "1000"]),
        (SlidingWindow(3, 4, 1, 0, None), ["0111", "0011", "0001"]),
        (SlidingWindow(3, 4, 1, 1, 0), ["1100", "0110", "0011"]),
        (SlidingWindow(3, 4, 0, 0, 1), ["1100", "0110", "0011"]),
        (SlidingWindow(3, 2, -1, None, 0), ["0000", "1000", "1100"]),
        (SlidingWindow(3, 4, 5, 2, 9), ["0001", "0000", "0000"]),
    ],
)
def test_visible_by_hand(window: SlidingWindow, rows: list[str]) -> None:
    expected = [[digit == "1" for digit in row] for row in rows]
    np.testing.assert_array_equal(by_pairs(window, 4), expected)


@given(windows(), st.data())
def test_the_window_of_a_tile_counts_from_the_tile(
    case: tuple[SlidingWindow, int], data: st.DataObject
) -> None:
    window, Nk = case
    assume(window.Nq and Nk)
    (q0, q1), (k0, k1) = data.draw(ranges(window.Nq)), data.draw(ranges(Nk))
    own = window.of_tile(q0, q1, k0, k1)
    assert np.array_equal(by_pairs(own, k1 - k0), by_pairs(window, Nk)[q0:q1, k0:k1])
    assert (own.Nq, own.length) == (q1 - q0, min(max(window.length - k0, 0), k1 - k0))


@given(windows())
def test_visible_takes_numbers_and_arrays(drawn: tuple[SlidingWindow, int]) -> None:
    window, Nk = drawn
    on_arrays = window.visible(np.arange(window.Nq)[:, None], np.arange(Nk))
    expected = by_pairs(window, Nk)
    np.testing.assert_array_equal(np.broadcast_to(on_arrays, expected.shape), expected)


# --- ranges and kinds ---------------------------------------------------------------------------


@given(windows(), st.lists(st.tuples(*(st.integers(0, 27),) * 4), min_size=1, max_size=9))
def test_ranges_and_kinds_of_arrays_are_those_of_their_elements(
    drawn: tuple[SlidingWindow, int], tiles: list[tuple[int, int, int, int]]
) -> None:
    window, _ = drawn
    q0, q1, k0, k1 = map(np.array, zip(*tiles, strict=True))
    ranges_of = (window.key_range, window.full_key_range, window.query_range)
    for find in ranges_of:
        found = np.broadcast_arrays(*find(q0, q1))
        np.testing.assert_array_equal(np.stack(found, 1), [find(a, b) for a, b, *_ in tiles])
    np.testing.assert_array_equal(window.kind(q0, q1, k0, k1), [window.kind(*x) for x in tiles])


@given(windows(), st.data())
def test_ranges_of_keys_and_queries_are_the_smallest(
    drawn: tuple[SlidingWindow, int], data: st.DataObject
) -> None:
    window, Nk = drawn
    visible = by_pairs(window, Nk)
    if window.Nq:
        q0, q1 = data.draw(ranges(window.Nq))
        assert window.key_range(q0, q1) == smallest_range(visible[q0:q1].any(axis=0))
        assert window.key_range(q0, q0) == (0, 0)
    if Nk:
        k0, k1 = data.draw(ranges(Nk))
        assert window.query_range(k0, k1) == smallest_range(visible[:, k0:k1].any(axis=1))
        assert window.query_range(k0, k0) == (0, 0)


@given(windows(), st.data())
def test_full_key_range(drawn: tuple[SlidingWindow, int], data: st.DataObject) -> None:
    window, Nk = drawn
    if window.Nq:
        q0, q1 = data.draw(ranges(window.Nq))
        lo, hi = window.full_key_range(q0, q1)
        expected = np.flatnonzero(by_pairs(window, Nk)[q0:q1].all(axis=0))
        np.testing.assert_array_equal(np.arange(lo, hi), expected)


@given(windows(), st.data())
def test_kind_of_any_rectangle(drawn: tuple[SlidingWindow, int], data: st.DataObject) -> None:
    window, Nk = drawn
    if window.Nq and Nk:
        (q0, q1), (k0, k1) = data.draw(ranges(window.Nq)), data.draw(ranges(Nk))
        assert window.kind(q0, q1, k0, k1) == kind_of(by_pairs(window, Nk)[q0:q1, k0:k1])


# --- the whole mask of some heads ---------------------------------------------------------------


@st.composite
def attention_masks(draw: st.DrawFn, longest: int = 24) -> tuple[AttentionMask, Bools]:
    """Draw a mask for three heads, and its visible pairs, (3, Nq, Nk)."""
    window, Nk = draw(windows(longest))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (HEADS.stop - HEADS.start, window.Nq, Nk)
    visible = np.broadcast_to(by_pairs(window, Nk), shape)
    mask = block_mask = None
    if draw(st.booleans()):
        lead = [n if draw(st.booleans()) else 1 for n in shape]
        mask = rng.random(lead) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
        visible = visible & mask
    if draw(st.booleans()):
        size = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
        B, Hq = draw(st.sampled_from([(1, 1), (3, 1), (1, 6), (3, 6)]))
        if draw(st.booleans()):
            blocks = rng.random((B, Hq, -(-window.Nq // size[0]), -(-Nk // size[1]))) < 0.6
            block_mask = BlockMask(blocks, size)
        else:
            dense = rng.random((B, Hq, window.Nq, Nk)) < 0.8
            block_mask = BlockMask.from_mask(dense, size)
        visible = visible & block_mask.to_dense((3, 6, window.Nq, Nk))[BATCH, HEADS]
    return AttentionMask(window, Nk, mask, block_mask, BATCH, HEADS), visible


@given(attention_masks(), st.data())
def test_visible_of_a_tile(drawn: tuple[AttentionMask, Bools], data: st.DataObject) -> None:
    attn_mask, visible = drawn
    if attn_mask.window.Nq and attn_mask.Nk:
        (q0, q1), (k0, k1) = data.draw(ranges(attn_mask.window.Nq)), data.draw(ranges(attn_mask.Nk))
        part = attn_mask.visible(Tile(q0, q1, k0, k1, PARTIAL))
        expected = visible[:, q0:q1, k0:k1]
        assert part.shape[1:] == expected.shape[1:]
        np.testing.assert_array_equal(np.broadcast_to(part, expected.shape), expected)


@given(attention_masks(), st.data())
def test_kind_never_claims_too_much(
    drawn: tuple[AttentionMask, Bools], data: st.DataObject
) -> None:
    attn_mask, visible = drawn
    if attn_mask.window.Nq and attn_mask.Nk:
        (q0, q1), (k0, k1) = data.draw(ranges(attn_mask.window.Nq)), data.draw(ranges(attn_mask.Nk))
        claimed, true = attn_mask.kind(q0, q1, k0, k1), kind_of(visible[:, q0:q1, k0:k1])
        assert claimed in (true, PARTIAL)
        if attn_mask.dense is None and attn_mask.block_mask is None:
            assert claimed == true


def check_tiles(tiles: list[Tile], visible: Bools, queries: slice, keys: slice) -> None:
    """Every visible pair of some queries and keys exactly once, and no empty tile."""
    counts = np.zeros(visible.shape[1:], int)
    for tile in tiles:
        assert queries.start <= tile.q0 < tile.q1 <= queries.stop
        assert keys.start <= tile.k0 < tile.k1 <= keys.stop
        assert tile.kind != EMPTY
        if tile.kind == FULL:
            assert visible[:, tile.queries, tile.keys].all()
        counts[tile.queries, tile.keys] += 1
    assert counts.max(initial=0) <= 1
    inside = np.zeros_like(counts)
    inside[queries, keys] = 1
    missed = visible.any(axis=0) & (counts == 0) & (inside == 1)
    assert not missed.any()


@given(attention_masks(), st.integers(1, 30), st.booleans(), st.data())
def test_tiles_of_some_queries_or_keys(
    drawn: tuple[AttentionMask, Bools], block: int, of_rows: bool, data: st.DataObject
) -> None:
    attn_mask, visible = drawn
    lengths = attn_mask.window.Nq, attn_mask.Nk
    if lengths[not of_rows]:
        start, stop = data.draw(ranges(lengths[not of_rows]))
        some, every = slice(start, stop), slice(0, lengths[of_rows])
        walk = attn_mask.row_tiles if of_rows else attn_mask.column_tiles
        tiles = list(walk(start, stop, block))
        check_tiles(tiles, visible, *((some, every) if of_rows else (every, some)))
        ends = [(x.k0, x.k1) if of_rows else (x.q0, x.q1) for x in tiles]
        blocks = [lo // block for lo, _ in ends]
        assert blocks == sorted(blocks) == [(hi - 1) // block for _, hi in ends]


@given(attention_masks(), st.integers(1, 30), st.integers(1, 30), st.sampled_from(["q", "kv"]))
def test_schedule_has_every_visible_pair_once(
    drawn: tuple[AttentionMask, Bools], block_q: int, block_k: int, order: str
) -> None:
    attn_mask, visible = drawn
    tiles = list(schedule(attn_mask, block_q, block_k, order))
    check_tiles(tiles, visible, slice(0, attn_mask.window.Nq), slice(0, attn_mask.Nk))
    blocks = [(tile.q0 // block_q, tile.k0 // block_k) for tile in tiles]
    assert blocks == sorted(blocks, key=lambda b: b if order == "q" else b[::-1])


@pytest.mark.parametrize(
    ("left", "right", "offset"), [(None, 0, 40), (100, 0, 0), (90, 150, 30), (3, None, -50)]
)
def test_long_blocks_hold_every_pair_once(left: int | None, right: int | None, offset: int) -> None:
    window = SlidingWindow(517, 601, offset, left, right)
    visible = np.asarray(window.visible(np.arange(517)[:, None], np.arange(620)))[None]
    attn_mask = AttentionMask(window, 620)
    for order in ("q", "kv"):
        tiles = list(schedule(attn_mask, 256, 512, order))
        check_tiles(tiles, visible, slice(0, 517), slice(0, 620))


def test_causal_by_hand() -> None:
    attn_mask = AttentionMask(SlidingWindow(5, 5, 0, None, 0), 5)
    assert list(schedule(attn_mask, 2, 2)) == [
        Tile(0, 2, 0, 2, PARTIAL),
        Tile(2, 4, 0, 2, FULL),
        Tile(2, 4, 2, 4, PARTIAL),
        Tile(4, 5, 0, 2, FULL),
        Tile(4, 5, 2, 4, FULL),
        Tile(4, 5, 4, 5, FULL),
    ]


def test_an_unknown_order() -> None:
    with pytest.raises(ValueError, match=r"^outer_loop must be 'q' or 'kv'; got 'rows'$"):
        list(schedule(AttentionMask(SlidingWindow(2, 2, 0, None, None), 2), 1, 1, "rows"))


# --- small functions ----------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 60))
def test_cut_covers_an_axis(length: int, block: int) -> None:
    parts = list(cut(length, block))
    assert [i for lo, hi in parts for i in range(lo, hi)] == list(range(length))
    assert all(lo % block == 0 and lo < hi <= lo + block for lo, hi in parts)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 60))
def test_cut_between_covers_a_range(lo: int, hi: int, block: int) -> None:
    parts = list(cut_between(lo, hi, block))
    assert [i for a, b in parts for i in range(a, b)] == list(range(lo, hi))
    assert all(a // block == (b - 1) // block for a, b in parts)


@pytest.mark.parametrize(
    ("M", "D", "sizes"),
    [
        (0, 64, (1, 1)),
        (256, 64, (1, 1)),
        (257, 64, (2, 2)),
        (48 * 1024, 64, (64, 192)),
        (1024, 8, (8, 32)),
        (100, 0, (1, 25)),
    ],
)
def test_sizes_for_memory(M: int, D: int, sizes: tuple[int, int]) -> None:
    """Algorithm 1, line 1: Bc = ceil(M / 4D) and Br = min(Bc, D)."""
    assert sizes_for_memory(M, D) == sizes


@pytest.mark.parametrize("shape", [(2, 7, 9), (1, 7, 1), (2, 1, 9), (2, 1, 1)])
def test_tile_of_leaves_short_axes_alone(shape: tuple[int, ...]) -> None:
    x: NDArray[Any] = np.arange(np.prod(shape)).reshape(shape)
    part = tile_of(x, Tile(2, 5, 3, 9, PARTIAL))
    whole = np.broadcast_to(x, (shape[0], 7, 9))[:, 2:5, 3:9]
    np.testing.assert_array_equal(np.broadcast_to(part, whole.shape), whole)
    assert np.shares_memory(part, x)
