"""Counts of tiles against a walk over the schedule, tile by tile."""

from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tileattn.algorithm import mask as of_mask
from tileattn.algorithm.mask import AttentionMask, SlidingWindow
from tileattn.algorithm.tiles import cut
from tileattn.call.block_mask import FULL, BlockMask
from tileattn.traffic import tiles as of_tiles
from tileattn.traffic.tiles import TileCounts, count_tiles


def walked(mask: AttentionMask, tile: tuple[int, int]) -> dict[str, Any]:
    """Count the tiles that the loops of both orders meet."""
    block_q, block_k = tile
    rows = [list(mask.row_tiles(*span, block_k)) for span in cut(mask.window.Nq, block_q)]
    columns = [list(mask.column_tiles(*span, block_q)) for span in cut(mask.Nk, block_k)]
    parts = [part for row in rows for part in row]
    return {
        "visited": sum(len({part.k0 // block_k for part in row}) for row in rows),
        "parts": len(parts),
        "full": sum(part.kind == FULL for part in parts),
        "keys": sum(part.k1 - part.k0 for part in parts),
        "rows": sum(part.q1 - part.q0 for column in columns for part in column),
        "held": [bool(column) for column in columns],
    }


def plain(counts: TileCounts) -> dict[str, Any]:
    return counts._asdict() | {"held": counts.held.tolist()}


@st.composite
def alike(draw: st.DrawFn) -> list[AttentionMask]:
    """Draw masks that differ in their windows alone."""
    Nq, Nk = draw(st.integers(0, 60)), draw(st.integers(0, 60))
    blocks = None
    if draw(st.booleans()):
        bq, bk = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        rng = np.random.default_rng(draw(st.integers(0, 999)))
        kinds = rng.integers(0, 3, (2, 2, -(-Nq // bq), -(-Nk // bk)), np.int8)
        blocks = BlockMask(kinds > 0, (bq, bk))
        blocks.kinds = kinds  # partial ones too
    dense = np.ones((1, 1, 1), np.bool_) if draw(st.integers(0, 4)) == 4 else None
    side = st.none() | st.integers(0, 8) | st.integers(0, 70) | st.just(1 << 60)
    masks = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.just(Nk) | st.integers(0, Nk))
        offset = draw(st.just(length - Nq) | st.integers(-70, 70))
        window = SlidingWindow(Nq, length, offset, draw(side), draw(side))
        masks.append(AttentionMask(window, Nk, dense, blocks, 1, slice(1, 2)))
    return masks


sizes = st.integers(1, 40)


@settings(max_examples=400)
@given(
    alike(), st.tuples(sizes, sizes), st.sampled_from([7, 256]), st.sampled_from([1, 50, 1 << 18])
)
def test_counts_are_those_of_the_walk(
    masks: list[AttentionMask], tile: tuple[int, int], tall: int, at_once: int
) -> None:
    """Also where tiles come in halves, and where prefix sums are taken in several steps."""
    with (
        patch.object(of_mask, "TALL", tall),
        patch.object(of_tiles, "TALL", tall),
        patch.object(of_tiles, "_AT_ONCE", at_once),
    ):
        counts = count_tiles(masks, tile)
        assert [plain(x) for x in counts] == [walked(mask, tile) for mask in masks]
