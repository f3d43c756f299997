"""The order in which key blocks of the Hopper backward pass add to dq, run on the CPU."""

import ctypes
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import H200, asked, backward
from tests.kernels.cuda.src.on_host import Array, block_with, built, pointer, sources
from tests.kernels.cuda.src.scheduler_on_host import scheduler_texts
from tileattn.algorithm.mask import SlidingWindow
from tileattn.call.block_mask import EMPTY
from tileattn.kernels.cuda.families.hopper import HOPPER_BACKWARDS, HOPPER_DQ_CONVERT
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan.assignment import work_tiles
from tileattn.kernels.cuda.plan.plan import LaunchPlan

CAUSAL = (None, 0)

_WORK_TILES = """\
#include "tile_scheduler_sm90.cuh"

extern "C" int claim_all(const Params* p, int* found) {
    const int* const begin = found;
    BwdWorkTile work{};
    for (int n = 0; get_work(*p, u32(n), work); ++n) {
        if (work.k0 >= work.Nk(*p)) continue;
        const QueryTileList list(*p, work);
        const QueryTiles& tiles = work.tiles;
        for (int index = tiles.first; index != tiles.stop; index = tiles.next(index), found += 8) {
            const int row[] = {n, work.b, work.kv, work.first_head(*p), work.end_head(*p),
                               work.k0 / BLOCK_K, list.tile(index), list.rank(*p, work, index)};
            std::copy(row, row + 8, found);
        }
    }
    return int(found - begin) / 8;
}
"""

_HEADS = """\
#include "tile_scheduler_sm90.cuh"

extern "C" int visit_all(const Params* p, int* found) {
    const int* const begin = found;
    BwdWorkTile work{};
    for (int n = 0; get_work(*p, u32(n), work); ++n)
        for_each_index(*p, work, [&](int index, int first, int end) {
            for (int h = first; h < end; ++h) *found++ = n, *found++ = h, *found++ = index;
        });
    return int(found - begin) / 3;
}
"""

_COUNTED = """\
#include "dq_counter.cuh"
#include "tile_scheduler_sm90.cuh"

extern "C" void convert(const Params* p, int done, int grid, int* found) {
    BwdWorkTile work{};
    for (int n = 0; n < done && get_work(*p, u32(n), work); ++n)
        for (u32 thread = 0; thread < DQ_COUNT; ++thread)
            count_dq(*p, work.b, work.kv, 1);
    const int tiles = block_count<BLOCK_Q>(*p, p->Nq);
    for (int n = 0; n < grid; ++n) {
        const int tile = dq_tile(*p, tiles, n);
        const HeadBlock<BLOCK_Q> at(*p, p->query_ends(), int(p->Hq), tile / tiles, tile % tiles);
        const Sequence sequence(*p, at.b);
        *found++ = tile, *found++ = dq_is_complete(*p, sequence, at.h / int(p->group));
    }
}
"""

_SEMAPHORES = """\
#pragma once
inline void add_to_semaphore(u32* place, u32 value) { *place += value; }
inline u32 read_semaphore(const u32* place) { return *place; }
"""


class Attending(NamedTuple):
    """A query tile of a work tile of the backward pass, in the order of claims."""

    claim: int
    b: int
    kv: int
    first_head: int
    end_head: int
    block: int
    tile: int
    rank: int


def scheduler(folder: Path, key: KernelKey, text: str) -> ctypes.CDLL:
    """Compile a text that names the scheduler of a kernel, for the CPU."""
    texts = scheduler_texts(key) | sources("dq_counter.cuh") | {"tma_sm90.cuh": _SEMAPHORES}
    return built(folder, texts | {"work_tiles.cpp": text}, "work_tiles.cpp")


def backward_work_tiles(
    folder: Path, plan: LaunchPlan, key: KernelKey, **integers: Array
) -> list[Attending]:
    """Find the query tiles of all work tiles of the backward pass, each in the order of its use."""
    P = plan.problem
    block = block_with(plan, integers)
    library = scheduler(folder, key, _WORK_TILES)
    most = P.B * P.Hq * (P.Nq // key.block_q + 1) * (P.Nk // key.block_k + 1)
    found = np.empty((most, len(Attending._fields)), np.int32)
    count = library.claim_all(pointer(block), pointer(found))
    return [Attending(*row) for row in found[:count].tolist()]


@pytest.mark.parametrize(
    ("D", "Hq", "window", "last_first"),
    [
        (64, 3, CAUSAL, True),
        (64, 3, (None, 7), True),
        (64, 3, (None, 300), True),
        (64, 3, (None, None), False),
        (64, 24, CAUSAL, False),
        (64, 3, (90, 20), False),
        (128, 3, CAUSAL, False),
        (128, 24, CAUSAL, False),
    ],
)
@pytest.mark.parametrize(
    ("Nq", "Nk", "lengths", "offsets"),
    [
        (500, 500, (500, 500), (0, 0)),
        (333, 1025, (1025, 130), (692, -203)),
        (1030, 300, (300, 257), (-730, 400)),
        (129, 128, (0, 1), (0, 0)),
    ],
)
@pytest.mark.parametrize("sm_count", [5, 132])
def test_a_key_block_waits_for_those_that_were_claimed_before(
    D: int,
    Hq: int,
    window: Any,
    last_first: bool,
    Nq: int,
    Nk: int,
    lengths: tuple[int, ...],
    offsets: tuple[int, ...],
    sm_count: int,
    tmp_path: Path,
) -> None:
    """At each dq tile it waits for all earlier claims, and for no later one.

    So the first claimed of all unfinished work tiles never waits, and there is no deadlock, however
    few CTAs are resident. The order of keys, and so of the sums, does not depend on the number of
    SMs. Staggered heads have staggered claims.
    """
    problem = asked(D=D, Dv=D, Hq=Hq, Hkv=3, Nq=Nq, Nk=Nk, window=window)
    plan = backward(problem, replace(H200, sm_count=sm_count), deterministic=True)
    key = next(x.key for x in plan.launches if x.key.kernel in HOPPER_BACKWARDS)
    integers = {"kv_lengths": np.array(lengths), "q_offset": np.array(offsets)}
    found = backward_work_tiles(tmp_path, plan, key, **integers)
    adds: Counter[tuple[int, int, int]] = Counter()
    blocks = defaultdict(list)
    for x in found:
        for h in range(x.first_head, x.end_head):
            dq_tile = x.b, h, x.tile
            assert x.rank == adds[dq_tile]
            adds[dq_tile] += 1
            blocks[dq_tile].append(x.block)
    assert all(own == sorted(own, reverse=last_first) for own in blocks.values())
    expected = {
        (b, h, q0 // key.block_q, k0 // key.block_k)
        for b in range(problem.B)
        for h in range(problem.Hq)
        for q0 in range(0, Nq, key.block_q)
        for k0 in range(0, Nk, key.block_k)
        if SlidingWindow(Nq, lengths[b], offsets[b], *window).kind(
            q0, min(q0 + key.block_q, Nq), k0, k0 + key.block_k
        )
        != EMPTY
    }
    added = {(*tile, block) for tile, own in blocks.items() for block in own}
    assert added == expected
    assert sum(adds.values()) == len(expected)
    # A work tile visits its query tiles from the last one down, or from the first one up.
    for x, y in pairwise(found):
        assert x.claim < y.claim or (x.claim == y.claim and (x.tile < y.tile) == last_first)
    if apart := plan.fields["stagger"]:
        heads_before = {x: (x.b * problem.Hkv + x.kv) * -(-Nk // key.block_k) for x in found}
        assert all(x.claim == before + x.block * apart for x, before in heads_before.items())


@pytest.mark.parametrize("D", [64, 128, 192, 256])
def test_every_second_run_of_key_blocks_begins_at_the_diagonal(D: int, tmp_path: Path) -> None:
    """All others start at the last query."""
    problem = asked(D=D, Dv=D, Hq=12, Hkv=3, Nq=3000, Nk=5000, window=CAUSAL)
    plan = backward(problem, H200)
    key = next(x.key for x in plan.launches if x.key.kernel in HOPPER_BACKWARDS)
    run = plan.fields["run_keys"]
    found = backward_work_tiles(
        tmp_path, plan, key, kv_lengths=np.array([5000, 4000]), q_offset=np.array([2000, 1000])
    )
    rising = {(x.b, x.block): x.tile < y.tile for x, y in pairwise(found) if x.claim == y.claim}
    assert {*rising.values()} == {False, True}
    for (_, block), rises in rising.items():
        assert rises == block * key.block_k // run % 2


@pytest.mark.parametrize(
    ("window", "apart"), [(CAUSAL, False), ((300, 0), True), ((70, None), True)]
)
@pytest.mark.parametrize("D", [64, 128, 192, 256])
def test_query_heads_of_a_key_block(D: int, window: Any, apart: bool, tmp_path: Path) -> None:
    """In a window heads are the outer loop, otherwise tiles are. Each tile of a head comes once."""
    problem = asked(D=D, Dv=D, Hq=12, Hkv=3, Nq=900, Nk=1000, window=window)
    plan = backward(problem, H200)
    key = next(x.key for x in plan.launches if x.key.kernel in HOPPER_BACKWARDS)
    found = np.empty((9999, 3), np.int32)
    block = block_with(plan, {})
    library = scheduler(tmp_path, key, _HEADS)
    count = library.visit_all(pointer(block), pointer(found))
    kept = backward_work_tiles(tmp_path, plan, key)
    assert count == 4 * len(kept)
    visits = found[:count].tolist()
    assert len({*map(tuple, visits)}) == count
    of_claim = defaultdict(list)
    for claim, h, tile in visits:
        of_claim[claim].append((h, tile))
    for own in of_claim.values():
        heads, tiles = [*dict.fromkeys(h for h, _ in own)], [*dict.fromkeys(i for _, i in own)]
        assert heads == [*range(heads[0] // 4 * 4, heads[0] // 4 * 4 + 4)]
        pairs = (
            [(h, i) for h in heads for i in tiles]
            if apart
            else [(h, i) for i in tiles for h in heads]
        )
        assert own == pairs


@pytest.mark.parametrize(
    ("sizes", "window", "splits"),
    [
        ({"D": 64, "Hq": 3, "Nq": 9000, "Nk": 300}, (None, None), (1, 4)),
        ({"D": 128, "Hq": 24, "Nq": 4000, "Nk": 700}, CAUSAL, (4, 1)),
        ({"D": 128, "Hq": 21, "Nq": 3000, "Nk": 70}, (None, None), (4, 4)),
        ({"D": 64, "Hq": 48, "Nq": 5000, "Nk": 2500}, (2200, 0), (2, 1)),
    ],
    ids=str,
)
def test_splits_share_the_queries_of_a_key_block(
    sizes: dict[str, Any], window: Any, splits: tuple[int, int], tmp_path: Path
) -> None:
    """Each query tile of each head is in one split."""
    problem = asked(Dv=sizes["D"], Hkv=3, window=window, **sizes)
    plan = backward(problem, H200)
    main = plan.kind.main
    assert main is not None
    assert (plan.fields["head_splits"], plan.fields["query_splits"]) == splits
    found = np.empty((1 << 17, 3), np.int32)
    library = scheduler(tmp_path, main.key, _HEADS)
    count = library.visit_all(pointer(block_with(plan, {})), pointer(found))
    visits = found[:count].tolist()
    kept = backward_work_tiles(tmp_path, plan, main.key)
    block_of = {x.claim: (x.b, x.block) for x in kept}
    got = Counter((*block_of[claim], h, tile) for claim, h, tile in visits)
    assert {*got.values()} == {1}
    expected = {
        (b, k0 // main.key.block_k, h, q0 // main.key.block_q)
        for b in range(problem.B)
        for h in range(problem.Hq)
        for q0 in range(0, problem.Nq, main.key.block_q)
        for k0 in range(0, problem.Nk, main.key.block_k)
        if SlidingWindow(problem.Nq, problem.Nk, problem.Nk - problem.Nq, *window).kind(
            q0, min(q0 + main.key.block_q, problem.Nq), k0, k0 + main.key.block_k
        )
        != EMPTY
    }
    assert {*got} == expected


@pytest.mark.parametrize(("D", "Hq", "window"), [(64, 3, CAUSAL), (128, 6, (None, None))])
@pytest.mark.parametrize(("B", "Nq", "Nk"), [(9, 1000, 2000), (2, 300, 100), (70, 4096, 1030)])
def test_heads_whose_dq_is_complete_are_converted_first(
    B: int, D: int, Hq: int, window: Any, Nq: int, Nk: int, tmp_path: Path
) -> None:
    """Each tile is converted once; the tiles of the last group of heads come last.

    A head is complete when all its key blocks have counted, also key blocks without queries.
    """
    plan = backward(asked(B=B, D=D, Dv=D, Hq=Hq, Hkv=3, Nq=Nq, Nk=Nk, window=window), H200)
    convert = next(x for x in plan.launches if x.key.kernel == HOPPER_DQ_CONVERT)
    heads, blocks = 3 * B, -(-Nk // convert.key.block_k)
    of_head = convert.grid // heads  # tiles
    splits = plan.fields["head_splits"] * plan.fields["query_splits"]
    _, head, first = work_tiles(blocks, heads * splits, plan.fields["head_groups"])
    head //= splits
    key = replace(convert.key, split_q=splits > 1)
    library = scheduler(tmp_path, key, _COUNTED)
    for left in (0, 1, 5, 132, len(head)):
        counter, found = np.zeros(heads, np.uint32), np.empty((convert.grid, 2), np.int32)
        block, done = block_with(plan, {}, dq_counter=counter), max(0, len(head) - left)
        library.convert(pointer(block), done, convert.grid, pointer(found))
        tiles, complete = found.T
        assert sorted(tiles) == list(range(convert.grid))
        unfinished = set(head[done:].tolist())
        assert [x // of_head not in unfinished for x in tiles.tolist()] == complete.tolist()
        last = [x // of_head in head[first == first.max()] for x in tiles.tolist()]
        assert last == sorted(last)
        if left <= 132 and plan.fields["head_groups"] > 1:
            assert not complete.all() or not left
            assert complete[: last.index(True)].all()
