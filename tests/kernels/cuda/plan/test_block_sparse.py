"""Block masks as kernels read them, and lists of tiles, tested against every pair; no GPU."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tileattn import BlockMask
from tileattn.call.block_mask import EMPTY, FULL, PARTIAL
from tileattn.expressions.functions import mask_expression
from tileattn.kernels.cuda.plan.block_sparse import partial_blocks, tile_kinds
from tileattn.kernels.cuda.plan.tile_kinds import TileKinds
from tileattn.kernels.cuda.plan.tile_lists import END, TileLists

sides = st.sampled_from([1, 2, 3, 5, 8, 12])


@given(
    block=st.tuples(sides, sides),
    tile=st.tuples(sides, sides),
    shape=st.tuples(*[st.integers(1, 3)] * 2, *[st.integers(1, 6)] * 2),
    share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 99),
)
def test_tiles_are_what_their_blocks_are(
    block: tuple[int, int], tile: tuple[int, int], shape: Any, share: float, seed: int
) -> None:
    """A tile is empty where all its blocks are, full where all are, and partial elsewhere."""
    blocks = np.random.default_rng(seed).random(shape) < share
    mask = BlockMask(blocks, block)
    pairs = np.repeat(np.repeat(blocks, block[0], axis=2), block[1], axis=3)
    made = TileLists(TileKinds(tile, pairs.shape), 1, backward=False)
    kinds, lists, before = tile_kinds(mask, tile), made.lists(mask), made.tiles_before(mask)
    rows, columns = (-(-n // side) for n, side in zip(pairs.shape[2:], tile, strict=True))
    assert kinds.shape == (*shape[:2], rows, columns)
    assert lists.shape == (*shape[:2], rows, columns + 1) == made.shape(mask)
    assert before.shape == lists.shape
    assert made.tiles_before(mask) is before
    for b, h, r in np.ndindex(*shape[:2], rows):
        wanted: list[int] = []
        entries: list[int] = []
        for c in range(columns):
            assert before[b, h, r, c] == len(entries)
            visible = pairs[b, h, r * tile[0] :, c * tile[1] :][: tile[0], : tile[1]]
            wanted.append(FULL if visible.all() else PARTIAL if visible.any() else EMPTY)
            if visible.any():
                entries.append(2 * c + (not visible.all()))
        assert before[b, h, r, -1] == len(entries)
        assert kinds[b, h, r].tolist() == wanted
        unused = [END - len(entries)] * (columns + 1 - len(entries))
        assert lists[b, h, r].tolist() == entries + unused


@given(
    block=st.tuples(sides, sides),
    tile=st.tuples(sides, sides),
    heads=st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 2)]),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    band=st.integers(0, 30),
    seed=st.integers(0, 99),
)
def test_query_tiles_of_a_block_mask_and_a_function(
    block: tuple[int, int], tile: tuple[int, int], heads: Any, sizes: Any, band: int, seed: int
) -> None:
    """Heads that share keys have one list; a rank counts the key tiles before that list a tile."""
    (Hkv, group), (Nq, Nk) = heads, sizes
    grid = [-(-n // side) for n, side in zip(sizes, block, strict=True)]
    mask = BlockMask(np.random.default_rng(seed).random((1, Hkv * group, *grid)) < 0.4, block)
    visible = mask_expression(lambda b, h, i, j: abs(i - j) <= band, (), "mask_mod")
    own = TileKinds(tile, (1, Hkv * group, Nq, Nk), visible, "host")
    made = TileLists(own, group, backward=True)
    lists = made.lists(mask).reshape(1, Hkv, -(-Nk // tile[1]), -(-Nq // tile[0]) + 1, 2)
    assert (1, Hkv, lists.shape[2], 2 * lists.shape[3]) == made.shape(mask)
    i, j = np.arange(Nq)[:, None], np.arange(Nk)
    near = np.abs(i - j) <= band
    blocks = mask.kinds[0].repeat(block[0], 1).repeat(block[1], 2)[:, :Nq, :Nk] == FULL
    for kv in range(Hkv):
        pairs = (near & blocks[kv * group : kv * group + group]).reshape(group, Nq, Nk)
        ranks = [0] * (lists.shape[3] - 1)
        for c in range(lists.shape[2]):
            there = iter(lists[0, kv, c].tolist())
            for r in range(len(ranks)):
                part = pairs[:, r * tile[0] :, c * tile[1] :][:, : tile[0], : tile[1]]
                if part.any():  # else it may be listed, where a block and the band lie apart
                    entry, rank = next(x for x in there if x[0] // 2 >= r)
                    assert (entry // 2, rank) == (r, ranks[r])
                    assert entry % 2 or part.all()
                listed = any(entry // 2 == r for entry, _ in lists[0, kv, c].tolist())
                ranks[r] += listed
            assert END - lists[0, kv, c, -1, 0] == sum(
                x < 2 * len(ranks) for x in lists[0, kv, c, :, 0]
            )


def test_a_partial_block_makes_its_tiles_partial() -> None:
    mask = BlockMask.from_mask(np.triu(np.ones((1, 1, 8, 8), bool)), (4, 4))
    assert tile_kinds(mask, (2, 4)).tolist() == [[[[1, 2], [1, 2], [0, 1], [0, 1]]]]


@pytest.mark.parametrize("block", [(4, 5), (3, 2), (16, 16)])
def test_pairs_of_partial_blocks_are_numbered(block: tuple[int, int]) -> None:
    """Each by its place, also where the last ones are cut; those without a number have one kind."""
    pairs = np.random.default_rng(0).random((2, 3, 10, 13)) < 0.5
    pairs[..., :4, :5], pairs[..., 4:8, 5:10] = False, True
    kinds, bits = partial_blocks(BlockMask.from_mask(pairs, block))
    assert bits.shape == ((kinds >= 0).sum(), *block)
    for b, h, r, c in np.ndindex(kinds.shape):
        visible = pairs[b, h, r * block[0] :, c * block[1] :][: block[0], : block[1]]
        wanted = np.zeros(block, bool)
        wanted[: visible.shape[0], : visible.shape[1]] = visible
        kind = int(kinds[b, h, r, c])
        assert (kind == -2) == visible.all()
        assert (kind == -1) == (not visible.any())
        if kind >= 0:
            np.testing.assert_array_equal(bits[kind], wanted)
