"""Each CUDA header of integers and bits answers as the Python module of the same name does."""

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.on_gpu import needs_gpu
from tests.probes import keys
from tests.probes.bounds import sums_of
from tests.probes.harness import Probe, params, strides_of
from tileattn.algorithm import philox
from tileattn.algorithm.mask import AttentionMask, SlidingWindow, schedule
from tileattn.algorithm.tiles import Tile, cut
from tileattn.call.block_mask import EMPTY, FULL, PARTIAL, BlockMask
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.assignment import work_tiles
from tileattn.kernels.cuda.plan.block_sparse import partial_blocks
from tileattn.kernels.cuda.plan.params import PARAMS

Array = NDArray[Any]
Pair = tuple[int, int]

pytestmark = needs_gpu


# --- params.cuh ---------------------------------------------------------------------------------


def test_parameters_arrive_by_value() -> None:
    block = np.frombuffer(np.random.default_rng(0).bytes(PARAMS.itemsize), PARAMS)[0]
    received = np.zeros(PARAMS.itemsize, np.uint8)
    Probe(keys.PARAMS[0])("received", block, received)
    assert received.tobytes() == block.tobytes()


# --- philox.cuh ---------------------------------------------------------------------------------

SEEDS = (0, 0x0123456789ABCDEF, 2**64 - 1)


def dropout(seed: int, p: float) -> dict[str, int]:
    return {"seed": seed, "threshold": int(p * 2**32)}


@pytest.mark.parametrize("seed", SEEDS)
def test_random_words_are_those_of_philox(seed: int) -> None:
    counters = np.random.default_rng(1).integers(0, 2**32, (300, 4), np.uint32)
    counters[0], counters[1] = 0, 2**32 - 1
    pair = seed % 2**32, seed // 2**32
    pairs = np.tile(np.array(pair, np.uint32), (len(counters), 1))
    words = np.zeros_like(counters)
    Probe(keys.PHILOX[0])("encrypted", counters, pairs, words, len(counters))
    assert np.array_equal(words, np.stack(philox.philox4x32(list(counters.T), pair), axis=1))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
def test_dropout_keeps_the_same_pairs(p: float) -> None:
    Nq, Nk = 45, 70
    probe = Probe(keys.PHILOX[0])
    for seed, (b, h) in product(SEEDS, [(0, 0), (1, 2), (3, 70_000)]):
        kept = np.full((Nq, Nk), 7, np.uint8)
        probe("kept", params(**dropout(seed, p), Nq=Nq, Nk=Nk), b, h, kept)
        assert np.array_equal(kept, philox.keep_tile(seed, p, b, np.array([h]), 0, Nq, 0, Nk)[0])


@pytest.mark.parametrize("transposed", [False, True])
def test_dropout_of_accumulators_keeps_the_same_pairs(transposed: bool) -> None:
    rows, columns, row, column, b, h, p = 48, 32, 16, 96, 1, 2, 0.4
    kept = np.full((rows, columns), 7, np.uint8)
    block = params(**dropout(SEEDS[1], p))
    Probe(keys.PHILOX[0])("kept_in_fragment", block, b, h, row, column, int(transposed), kept)
    r, c = (row, row + rows), (column, column + columns)
    i, j = (c, r) if transposed else (r, c)
    want = philox.keep_tile(SEEDS[1], p, b, np.array([h]), *i, *j)[0]
    assert np.array_equal(kept, want.T if transposed else want)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("origin", [(2, 5, 48, 160), (1, 0, 24, 16), (3, 70_000, 2**31 - 1, 1007)])
def test_dropout_counts_from_an_origin(origin: tuple[int, ...], transposed: bool) -> None:
    import cupy

    rows, columns, row, column, b, h, p = 48, 32, 16, 96, 1, 2, 0.4
    kept = np.full((rows, columns), 7, np.uint8)
    there = cupy.asarray([(0, 0, 0, 0), origin])
    block = params(**dropout(SEEDS[1], p), origin=there.data.ptr)
    Probe(keys.PHILOX[1])("kept_in_fragment", block, b, h, row, column, int(transposed), kept)
    i, j = (column, row) if transposed else (row, column)
    b0, h0, i, j = origin[0], origin[1], i + origin[2], j + origin[3]
    m, n = (columns, rows) if transposed else (rows, columns)
    want = philox.keep_tile(SEEDS[1], p, b + b0, np.array([h + h0]), i, i + m, j, j + n)[0]
    assert np.array_equal(kept, want.T if transposed else want)


# --- mask.cuh, tile_scheduler.cuh ----------------------------------------------------------------

FAR = 2**40  # farther than the 32-bit integers of the kernels reach
SIDES = (None, 0, 5, FAR)


def reach(left: int | None, right: int | None) -> dict[str, int]:
    return {"left": -1 if left is None else left, "right": -1 if right is None else right}


def boxes_in(Nq: int, Nk: int, count: int) -> Array:
    """Random boxes (q0, q1, k0, k1); a quarter are single pairs."""
    rng = np.random.default_rng(2)
    first = rng.integers(0, (Nq, Nk), (count, 2))
    past = rng.integers(first, (Nq, Nk)) + 1
    past[::4] = first[::4] + 1
    return np.stack([first, past], axis=2).reshape(count, 4).astype(np.int32)


def answers_of(window: SlidingWindow, boxes: Array) -> list[list[int]]:
    return [
        [
            int(window.visible(q0, k0)),
            window.kind(q0, q1, k0, k1),
            *window.key_range(q0, q1),
            *window.query_range(k0, k1),
        ]
        for q0, q1, k0, k1 in boxes.tolist()
    ]


@pytest.mark.parametrize(("left", "right"), list(product(SIDES, SIDES)))
def test_windows(left: int | None, right: int | None) -> None:
    Nq, Nk = 40, 60
    places = product([0, 1, 33, Nk], [-FAR, -70, -33, -1, 0, 20, 59, 75, FAR])
    lengths, offsets = np.array(list(places), np.int64).T
    boxes = boxes_in(Nq, Nk, 80)
    got = np.full((len(lengths), len(boxes), 6), -7, np.int32)
    p = params(Nq=Nq, Nk=Nk, **reach(left, right))
    given = lengths, offsets, boxes, len(boxes), got
    Probe(keys.MASK[0])("windows", p, *given, grid=(len(lengths),))
    for n, (length, offset) in enumerate(zip(lengths.tolist(), offsets.tolist(), strict=True)):
        assert got[n].tolist() == answers_of(SlidingWindow(Nq, length, offset, left, right), boxes)


@pytest.mark.parametrize(("given", "length"), [(-3, 0), (17, 17), (99, 60)])
def test_a_length_beyond_the_keys_is_their_number(given: int, length: int) -> None:
    boxes = boxes_in(40, 60, 80)
    got = np.full((len(boxes), 6), -7, np.int32)
    p = params(Nq=40, Nk=60, left=8, right=3, length=given, offset=-5)
    Probe(keys.MASK[0])("windows", p, None, None, boxes, len(boxes), got)
    assert got.tolist() == answers_of(SlidingWindow(40, length, -5, 8, 3), boxes)


@pytest.mark.parametrize(
    ("blocks", "heads", "groups"), [(1, 1, 1), (3, 7, 1), (3, 7, 7), (5, 11, 3), (2, 12, 4)]
)
def test_block_coords(blocks: int, heads: int, groups: int) -> None:
    got = np.full((blocks * heads, 2), -7, np.int32)
    Probe(keys.TILE_SCHEDULER[0])("block_coords", blocks, heads, groups, got, grid=(len(got),))
    assert got.tolist() == [
        [block, head]
        for group in np.array_split(np.arange(heads), groups)
        for block in range(blocks)
        for head in group
    ]


@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (300, 40), (70, None)])
@pytest.mark.parametrize("key", keys.FORWARD_SMEM, ids=keys.name_of)
def test_forward_work_tiles(key: KernelKey, left: int | None, right: int | None) -> None:
    """Assigned in order, or by a table; with the key tiles that are not empty, and those full."""
    B, Hq, Nq, Nk, groups, grid = 2, 6, 700, 810, 3, 5
    blocks = -(-Nq // key.block_q)
    count = blocks * B * Hq
    order = np.random.default_rng(4).permutation(count)
    size = 6 + 5 * (key.block_q // 64)
    sizes = {"B": B, "Hq": Hq, "Nq": Nq, "Nk": Nk, "head_groups": groups}
    p = params(**sizes, length=Nk, offset=Nk - Nq, **reach(left, right))
    workers = grid * key.groups
    table = np.full((-(-count // workers) + 1, workers), count, np.int32)
    table.flat[:count] = order
    there_and_back = np.arange(table.size).reshape(table.shape)
    there_and_back[1::2] = there_and_back[1::2, ::-1]
    for assignment, numbers in ((None, there_and_back), (table, table)):
        got = np.full((len(table), workers, size), -7, np.int32)
        Probe(key)("forward_work_tiles", p, assignment, len(table), got, grid=(grid,))
        block, head, _ = work_tiles(blocks, B * Hq, groups)
        for (iteration, worker), number in np.ndenumerate(numbers):
            if number >= count:
                assert (got[iteration, worker] == -7).all()
                continue
            place = int(block[number]) if right is None else blocks - 1 - int(block[number])
            q0, (b, h) = place * key.block_q, divmod(int(head[number]), Hq)
            found = got[iteration, worker].tolist()
            window = SlidingWindow(Nq, Nk, Nk - Nq, left, right)
            lo, hi = window.key_range(q0, min(q0 + key.block_q, Nq))
            tiles = lo // key.block_k, -(-hi // key.block_k)
            assert found[:6] == [b, h, q0, *tiles, iteration]
            for g, first in enumerate(range(q0, q0 + key.block_q, 64)):
                *tiles, ends_in_half = found[6 + 5 * g : 11 + 5 * g]
                assert_tiles(window, first, key.block_k, tiles)
                lo, hi = window.key_range(first, min(first + 64, Nq))
                if lo < hi:
                    assert ends_in_half == (0 < hi % key.block_k <= key.block_k // 2)


@pytest.mark.parametrize("key", [*keys.FORWARD_SMEM, *keys.BACKWARD_SMEM], ids=keys.name_of)
def test_addresses_of_tiles(key: KernelKey) -> None:
    """All are aligned as swizzled tiles must be, and lie within the shared memory of the launch."""
    got = np.zeros(64, np.uint32)
    Probe(key)("addresses", got)
    start, *others = got[got > 0].tolist()
    assert start % 1024 == 0
    assert min(others) == start
    assert len({*others}) == len(others) >= key.stages * 2 + 2
    assert all(x % 1024 == 0 and x < start + key.smem_bytes for x in others)


@pytest.mark.parametrize("length", [810, 500, 0])
@pytest.mark.parametrize(
    ("left", "right"), [(None, None), (None, 0), (300, 40), (70, None), (5, 0)]
)
@pytest.mark.parametrize("key", keys.BACKWARD_SMEM, ids=keys.name_of)
def test_backward_work_tiles(
    key: KernelKey, left: int | None, right: int | None, length: int
) -> None:
    """The same for key blocks and query tiles; each thread block claims the next work tile."""
    B, Hkv, Nq, Nk, groups, grid = 2, 3, 700, 810, 2, 5
    blocks = -(-Nk // key.block_k)
    count = blocks * B * Hkv
    window = SlidingWindow(Nq, length, 60, left, right)
    sizes = {"B": B, "Hkv": Hkv, "Nq": Nq, "Nk": Nk, "head_groups": groups}
    p = params(**sizes, length=length, offset=60, **reach(left, right))
    tiles = [(q0, min(q0 + key.block_q, Nq)) for q0 in range(0, Nq, key.block_q)]
    claimed, got = np.zeros(1, np.uint32), np.full((count, 7), -7, np.int32)
    Probe(key)("backward_work_tiles", p, claimed, got, grid=(grid,))
    assert claimed == count + grid  # each thread block finds once that there is nothing left
    block, head, _ = work_tiles(blocks, B * Hkv, groups)
    for n, (b, kv, k0, first, stop, full_begin, full_end) in enumerate(got.tolist()):
        assert (b, kv) == divmod(int(head[n]), Hkv)
        assert k0 == int(block[n]) * key.block_k
        kinds = [window.kind(q0, q1, k0, k0 + key.block_k) for q0, q1 in tiles]
        attended = [tile for tile, kind in enumerate(kinds) if kind != EMPTY]
        assert list(range(first, stop, -1)) == attended[::-1]
        found = [tile for tile in attended if full_begin <= tile < full_end]
        assert found == [tile for tile in attended if kinds[tile] == FULL]


def assert_tiles(window: SlidingWindow, q0: int, block_k: int, found: list[int]) -> None:
    """Compare the key tiles of 64 queries with the kinds of tiles."""
    begin, end, full_begin, full_end = found
    q1 = min(q0 + 64, window.Nq)
    kinds = {
        tile: window.kind(q0, q1, tile * block_k, (tile + 1) * block_k)
        for tile in range(-(-window.length // block_k))
        if q0 < q1
    }
    attended = [tile for tile, kind in kinds.items() if kind != EMPTY]
    assert list(range(begin, end)) == attended
    # The kernel asks of 64 queries, though there may be fewer: it may take full tiles for others.
    whole = [tile for tile, kind in kinds.items() if kind == FULL]
    assert set(range(full_begin, full_end)) & set(attended) <= set(whole)
    assert q1 < q0 + 64 or list(range(full_begin, full_end)) == whole


class Masks:
    """A dense mask and a block mask, where a key has them, and how a probe is given them."""

    def __init__(
        self, key: KernelKey, shape: tuple[int, int, int, int], block: Pair, empty: float
    ) -> None:
        B, Hq, Nq, Nk = shape
        rng = np.random.default_rng(3)
        self.shape = shape
        self.dense = rng.random((B, 1, Nq, Nk)) < 0.7 if key.mask else None
        self.blocks: BlockMask | None = None
        self.fields: dict[str, Any] = {"Hq": Hq, "Nq": Nq, "Nk": Nk}
        self.arrays: list[Array | None] = [self.dense, None, None]
        if self.dense is not None:
            self.fields["mask_at"] = strides_of(self.dense)
        if key.block_mask:
            counts = (1, Hq, -(-Nq // block[0]), -(-Nk // block[1]))
            density = rng.choice([0.5, 1.0], counts) * (rng.random(counts) > empty)
            density = density.repeat(block[0], axis=2).repeat(block[1], axis=3)[:, :, :Nq, :Nk]
            self.blocks = BlockMask.from_mask(rng.random(density.shape) < density, block)
            kinds, bits = partial_blocks(self.blocks)
            self.fields["block_kinds_at"] = strides_of(kinds)
            self.fields["mask_block_q"], self.fields["mask_block_k"] = block
            self.arrays[1:] = kinds, bits

    def attn_mask(self, window: SlidingWindow, b: int, h: int) -> AttentionMask:
        mask = None if self.dense is None else self.dense[b]
        return AttentionMask(window, self.shape[3], mask, self.blocks, b, slice(h, h + 1))

    def visible(self, window: SlidingWindow, b: int, h: int) -> Array:
        Nq, Nk = self.shape[2:]
        pairs: Array = self.attn_mask(window, b, h).visible(Tile(0, Nq, 0, Nk, PARTIAL))[0]
        return pairs


@pytest.mark.parametrize("key", keys.MASK, ids=keys.name_of)
def test_attention_masks(key: KernelKey) -> None:
    B, Hq, Nq, Nk = shape = 2, 3, 53, 150
    masks = Masks(key, shape, (20, 12), empty=0.5)
    boxes = boxes_in(Nq, Nk, 150)
    boxes[-40:, 1] += 40  # past the end
    boxes[-30:, 3] += 20
    kinds = np.full((B, Hq, len(boxes)), -7, np.int32)
    visible = np.full(shape, 7, np.uint8)
    p = params(length=141, offset=30, **reach(50, 9), **masks.fields)
    Probe(key)("attention_masks", p, *masks.arrays, boxes, len(boxes), kinds, visible, grid=(Hq, B))
    window = SlidingWindow(Nq, 141, 30, 50, 9)
    for b, h in product(range(B), range(Hq)):
        attn_mask = masks.attn_mask(window, b, h)
        want = [attn_mask.kind(q0, min(q1, Nq), k0, k1) for q0, q1, k0, k1 in boxes.tolist()]
        assert kinds[b, h].tolist() == want
        assert np.array_equal(visible[b, h], masks.visible(window, b, h))


def key_tiles(key: KernelKey, attn_mask: AttentionMask, q0: int) -> list[list[int]]:
    """List number and kind of the key tiles of a query block that are not empty."""
    q1 = min(q0 + key.block_q, attn_mask.window.Nq)
    lo, hi = attn_mask.window.key_range(q0, q1)
    tiles = range(lo // key.block_k, -(-hi // key.block_k))
    found = [[t, attn_mask.kind(q0, q1, t * key.block_k, (t + 1) * key.block_k)] for t in tiles]
    return [tile for tile in found if tile[1] != EMPTY]


def query_tiles(key: KernelKey, attn_mask: AttentionMask, k0: int) -> list[list[int]]:
    """List number and kind of the query tiles of a key block that are not empty."""
    lo, hi = attn_mask.window.query_range(k0, k0 + key.block_k)
    tiles = [q for q in cut(attn_mask.window.Nq, key.block_q) if q[0] < hi and q[1] > lo]
    found = [[q0 // key.block_q, attn_mask.kind(q0, q1, k0, k0 + key.block_k)] for q0, q1 in tiles]
    return [tile for tile in found if tile[1] != EMPTY]


VIEWS = {"open": (None, None, 0), "causal": (None, 0, -99), "window": (200, 30, 7)}


@pytest.mark.parametrize("block", [(64, 48), (20, 12)], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("key", keys.TILE_SCHEDULER, ids=keys.name_of)
def test_tiles_are_those_of_the_schedule(key: KernelKey, view: str, block: Pair) -> None:
    """Tiles come in order, each with its kind; they are the ones that the schedule cuts up.

    Where tiles and a block mask are not aligned the schedule may skip more, for it looks at parts.
    """
    B, Hq, Nq, Nk = shape = 1, 2, 1201, 1102
    left, right, offset = VIEWS[view]
    masks, window = (
        Masks(key, shape, block, empty=0.92),
        SlidingWindow(Nq, 1000, offset, left, right),
    )
    q_tiles, k_tiles = -(-Nq // key.block_q), -(-Nk // key.block_k)
    by_query = np.full((Hq, q_tiles, k_tiles + 1, 2), -1, np.int32)
    by_key = np.full((Hq, k_tiles, q_tiles + 1, 2), -1, np.int32)
    probe = Probe(key)
    p = params(length=1000, offset=offset, **reach(left, right), **masks.fields)
    probe("key_tile_kinds", p, *masks.arrays, by_query, k_tiles + 1, grid=(q_tiles, Hq, B))
    probe("query_tile_kinds", p, *masks.arrays, by_key, q_tiles + 1, grid=(k_tiles, Hq, B))
    for h in range(Hq):
        attn_mask = masks.attn_mask(window, 0, h)
        rows = [row[row[:, 0] >= 0].tolist() for row in by_query[h]]
        columns = [column[column[:, 0] >= 0].tolist() for column in by_key[h]]
        assert rows == [key_tiles(key, attn_mask, a * key.block_q) for a in range(q_tiles)]
        assert columns == [query_tiles(key, attn_mask, c * key.block_k) for c in range(k_tiles)]
        listed = {(a, tile) for a, row in enumerate(rows) for tile, _ in row}
        tiles = schedule(attn_mask, key.block_q, key.block_k)
        scheduled = {(tile.q0 // key.block_q, tile.k0 // key.block_k) for tile in tiles}
        exact = not key.block_mask or block == (64, 48)
        assert scheduled
        assert scheduled == listed if exact else scheduled <= listed


# --- score_tile.cuh -----------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("key", keys.SCORE_TILE, ids=keys.name_of)
def test_masked_out_and_dropped_elements_of_accumulators(key: KernelKey, transposed: bool) -> None:
    """Ones become -infinity where masked out, keys past the end too, then 0 where dropped."""
    Nq, Nk = 53, 80 if key.mask_vector_width == 16 else 70
    shape = (2, 3, Nq, Nk)
    size, b, h, i0, j0 = key.block_q, 1, 2, 32, 48
    masks, window = Masks(key, shape, (20, 12), empty=0.4), SlidingWindow(Nq, Nk, 4, 20, 13)
    start = (j0, i0) if transposed else (i0, j0)
    if masks.dense is not None:  # every byte but 0 is true
        masks.arrays[0] = masks.dense * np.uint8(1 << h)
    indices = np.full((size, size, 2), -7, np.int32)
    values = np.full((size, size), 7, sums_of(key))
    p = params(length=Nk, offset=4, **reach(20, 13), **dropout(SEEDS[1], 0.3), **masks.fields)
    Probe(key)("masked_out", p, *masks.arrays, b, h, *start, int(transposed), indices, values)
    if transposed:
        indices, values = indices.swapaxes(0, 1), values.T
    i, j = np.mgrid[i0 : i0 + size, j0 : j0 + size]
    assert np.array_equal(indices, np.stack([i, j], axis=2))

    visible = np.zeros((i0 + size, j0 + size), np.bool_)
    visible[:Nq, :Nk] = masks.visible(window, b, h)
    want = np.where(visible[i0:, j0:], 1.0, -np.inf)
    if key.dropout:
        heads = np.array([h])
        kept = philox.keep_tile(SEEDS[1], 0.3, b, heads, i0, i0 + size, j0, j0 + size)[0]
        want = np.where(kept, want, 0)
    # Queries past the end are not stored.
    assert np.array_equal(values[: Nq - i0], want[: Nq - i0])


# --- bias.cuh -----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_arch", ["", "800", "750"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("key", keys.BIAS, ids=keys.name_of)
def test_bias_in_accumulators_and_its_gradient(
    key: KernelKey, transposed: bool, as_arch: str
) -> None:
    """Past the last query and key the bias is 0 and no gradient is written."""
    rng, sums, M, N = np.random.default_rng(13), sums_of(key), key.block_q, key.block_k
    dtype = np.dtype(getattr(ml_dtypes, key.bias, key.bias))
    # Rows of a multiple of the vector, and of nothing larger; none is, of an odd length.
    Nk = 51 if not key.bias_alignment_bytes else 48 + key.bias_alignment_bytes // dtype.itemsize
    bias = rng.standard_normal((53, Nk)).astype(dtype)
    dbias, start = np.full_like(bias, 7), (16, 32)
    gradients = rng.standard_normal((M, N)).astype(np.float32).astype(sums)
    got = np.full((M, N), 7, sums)
    p = params(Nq=53, Nk=Nk, bias_at=(0, 0, Nk, 1))
    Probe(key, as_arch)("added", p, bias, *start, int(transposed), gradients, got, dbias)

    size, reach = bias.shape, [n + m for n, m in zip(start, (M, N), strict=True)]
    whole, want_dbias = np.zeros((300, 300), sums), np.full_like(dbias, 7)
    whole[: size[0], : size[1]] = bias.astype(sums)
    if transposed:
        there = np.full((300, 300), 7, dtype)
        there[start[1] : reach[1], start[0] : reach[0]] = gradients.T.astype(dtype)
        whole, want_dbias = whole.T, there[: size[0], : size[1]]
    assert np.array_equal(got, whole[start[0] : reach[0], start[1] : reach[1]])
    assert want_dbias.tobytes() == dbias.tobytes()
