"""Where kernels find the blocks of packed sequences, run on the CPU."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import H200, asked, backward, forward
from tests.kernels.cuda.src.on_host import Found, ordered, sequence_blocks
from tileattn.kernels.cuda.families.block_order import CHUNK, WHOLE
from tileattn.kernels.cuda.families.grid import block_count
from tileattn.kernels.cuda.families.hopper import HOPPER, HOPPER_BACKWARDS
from tileattn.kernels.cuda.plan.layout import contiguous_inputs

HQ = 3

Window = tuple[int | None, int | None]

KINDS = [(np.int64, np.int64), (np.int32, np.int32), (np.int32, np.int64), (np.int64, np.int32)]


def found(
    folder: Path, queries: Any, keys: Any, block: int, kinds: Any = KINDS[0], **more: Any
) -> list[Found]:
    """Find the blocks of queries, given the ends of all sequences; integers have two dtypes."""
    sizes: dict[str, Any] = {"B": 1, "Hq": HQ, "Hkv": 1, "Nq": queries[-1], "Nk": keys[-1]}
    problem = asked("float32", {"cu_seqlens_q"}, **sizes, sequences=len(queries) - 1)
    layout = contiguous_inputs(problem)._replace(kv_lengths=None, q_offset=None)
    plan = backward(problem, H200, layout)
    key = replace(plan.launches[0].key, block_q=block, packed=True)
    given = {"cu_seqlens_q": queries, "cu_seqlens_k": keys, **more}
    integers = {name: np.asarray(x, kinds[n % 2]) for n, (name, x) in enumerate(given.items())}
    count = int(block_count(problem, problem.Nq, block))
    return sequence_blocks(folder, plan, key, count, **integers)


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("block", [1, 16, 64, 128, 192])
def test_every_block_has_one_number(block: int, kinds: Any, tmp_path: Path) -> None:
    """Other numbers are blocks past the end of a sequence."""
    rng = np.random.default_rng(block)
    for _ in range(5):
        lengths = rng.integers(0, 300, (2, rng.integers(1, 9))) * rng.integers(0, 2, 1)
        lengths[:, -1] += 1
        queries, keys = (np.cumsum([0, *each]) for each in lengths)
        blocks = found(tmp_path, queries, keys, block, kinds)
        there = [x for x in blocks if x.block * block < x.Nq]
        expected = [(b, n) for b, N in enumerate(lengths[0]) for n in range(-(-N // block))]
        assert [(x.b, x.block) for x in there] == expected
        for x in blocks:
            assert (x.q_start, x.Nq) == (queries[x.b], lengths[0][x.b])
            assert (x.k_start, x.Nk) == (keys[x.b], lengths[1][x.b])
            assert (x.length, x.offset) == (x.Nk, x.Nk - x.Nq)


def test_rows_of_statistics_do_not_overlap(tmp_path: Path) -> None:
    lengths = np.array([5, 0, 128, 1, 127, 129, 0, 300])
    ends = np.cumsum([0, *lengths])
    blocks = {x.b: x for x in found(tmp_path, ends, ends, 1)}
    rows = (int(ends[-1]) // 128 + 2 * len(lengths)) * 128
    last = rows  # of the second head
    for x in (blocks[b] for b in sorted(blocks)):
        assert x.padded_row % 128 == 0
        assert x.padded_row >= last
        last = x.padded_row + max(-(-x.Nq // block) * block for block in (80, 128))
    assert last <= 2 * rows


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_lengths_and_offsets_of_the_call(kinds: Any, tmp_path: Path) -> None:
    """Each array has 4 or 8 bytes for an integer, whatever the others have."""
    ends, lengths = [0, 4, 6, 9], [2, -7, 99]
    blocks = found(tmp_path, ends, ends, 16, kinds, kv_lengths=lengths)
    assert {(x.b, x.length, x.offset) for x in blocks} == {(0, 2, -2), (1, 0, -2), (2, 3, 0)}
    blocks = found(tmp_path, ends, ends, 16, kinds, q_offset=[5, -3, 0])
    assert {(x.b, x.length, x.offset) for x in blocks} == {(0, 4, 5), (1, 2, -3), (2, 3, 0)}
    more = {"kv_lengths": lengths, "q_offset": [-5, -3, 1]}
    blocks = found(tmp_path, ends, ends, 16, kinds, **more)
    assert {(x.b, x.length, x.offset) for x in blocks} == {(0, 2, -5), (1, 0, -3), (2, 3, 1)}


def test_nothing_beyond_the_arrays_whatever_offsets_say(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        wild = [rng.integers(-(1 << 40), 1 << 40, 6), rng.integers(-50, 150, 6)][_ % 2]
        wild[-1] = 100
        for x in found(tmp_path, wild, wild, 16):
            assert 0 <= x.b < 5
            assert 0 <= x.block < 100 // 16 + 5
            assert 0 <= x.q_start <= x.q_start + x.Nq <= 100
            assert 0 <= x.padded_row - (100 // 128 + 10) * 128 <= (100 // 128 + 10) * 128


@pytest.mark.parametrize("window", [(None, None), (None, 0), (70, 20)], ids=str)
@pytest.mark.parametrize(
    ("D", "l2_bytes", "count"),
    [
        *((64, 1 << 30, 17), (64, 1 << 21, 17), (256, 1 << 21, 1023), (256, 1, 1024)),
        (64, 1 << 21, 5000),
    ],
)
def test_the_longest_sequences_go_first(
    D: int, l2_bytes: int, count: int, window: Window, tmp_path: Path
) -> None:
    """Each block is listed once. Blocks of sequences that share the L2 cache are interleaved.

    If there are many blocks, each chunk is ordered by itself.
    """
    rng = np.random.default_rng(D)
    lengths = rng.integers(0, 700, (2, count)) * rng.integers(0, 2, (2, count))
    lengths[:, 17:] //= 20
    lengths[:, -7:] = 300
    lengths[:, -1] = 400, 3
    queries, keys = (np.cumsum([0, *each]) for each in lengths)
    sizes: dict[str, Any] = {"B": 1, "Hq": HQ, "Hkv": 1, "Nq": queries[-1], "Nk": keys[-1]}
    problem = asked("float16", {"cu_seqlens_q"}, **sizes, D=D, Dv=D, window=window, sequences=count)
    layout = contiguous_inputs(problem)._replace(kv_lengths=None, q_offset=None)
    ends = {"cu_seqlens_q": queries.astype(np.int32), "cu_seqlens_k": keys}
    device = replace(H200, l2_bytes=l2_bytes)
    plans = forward(problem, device, layout), backward(problem, device, layout)
    for axis, plan in enumerate(plans):
        tile = next(x.key.tile for x in plan.launches if x.key.kernel.startswith("order"))
        workers = next(
            x.workers for x in plan.launches if x.key.kernel in (HOPPER, *HOPPER_BACKWARDS)
        )
        row_bytes = (4 * D, HQ * (8 if D <= 128 else 4) * D)[axis]  # wide heads have no sums of dq
        numbers = (queries, keys)[axis][-1] // tile[axis] + count
        blocks: list[Any] = []  # the chunk and the turn, the rank and the block
        for b, (Nq, Nk) in enumerate(lengths.T):
            rows, ranks = (_of_queries, _of_keys)[axis](Nq, Nk, window, *tile)
            fit = l2_bytes // 2 // row_bytes // max(rows, 1)
            turn = -rows, b // min(max(1, fit), workers)
            number = (queries, keys)[axis][b] // tile[axis] + b
            for n, rank in enumerate(ranks):
                chunk = (number + n) // CHUNK if numbers > WHOLE else 0
                blocks.append(((chunk, *turn), rank, (b, n)))
        blocks.sort()
        turns = [turn for turn, *_ in blocks]
        places = {turn: n for n, turn in reversed([*enumerate(turns)])}
        alike_in = Counter(turns)
        found = ordered(tmp_path, plan, **ends)[:, :10].tolist()
        for (own, _, block), (b, n, *place) in zip(blocks, found, strict=False):
            assert (b, n) == block
            alike = places[own], alike_in[own], 1
            assert place == [queries[b], keys[b], *lengths[:, b], len(blocks), *alike]
        for b, n, *place in found[len(blocks) :]:
            assert n * tile[axis] >= lengths[axis, b]
            assert place[4] == len(blocks)


@pytest.mark.parametrize(("rows", "sms", "heads"), [(255, 1, 2), (768, 9, 5), (230400, 9, 5)])
def test_interleaved_heads(rows: int, sms: int, heads: int, tmp_path: Path) -> None:
    """As many heads are interleaved as half of the L2 cache holds, or as have work for four waves.

    They are in groups of about equal size; a group never has parts of two sequences.
    """
    ends = np.arange(0, 7 * 256, 256)
    sizes: dict[str, Any] = {"B": 1, "Hq": 5, "Hkv": 5, "Nq": ends[-1], "Nk": ends[-1]}
    problem = asked("float16", {"cu_seqlens_q"}, **sizes, D=64, Dv=64, sequences=6)
    layout = contiguous_inputs(problem)._replace(kv_lengths=None, q_offset=None)
    plan = backward(problem, replace(H200, l2_bytes=2 * rows * 512, sm_count=sms), layout)
    found = ordered(tmp_path, plan, cu_seqlens_q=ends, cu_seqlens_k=ends)[:12, :10].tolist()
    assert [(b, n) for b, n, *_ in found] == [(b, n) for b in range(6) for n in range(2)]
    assert {x[-1] for x in found} == {heads}


def _of_queries(
    Nq: int, Nk: int, window: Window, block_q: int, block_k: int
) -> tuple[int, list[int]]:
    """Rows that the longest block of queries goes through, and ranks: most keys first."""
    starts = range(0, Nq, block_q)
    tiles = [_key_tiles(q0, min(q0 + block_q, Nq), Nq, Nk, window, block_k) for q0 in starts]
    return max([*tiles[:1], *tiles[-1:]], default=0) * block_k, [-x for x in tiles]


def _of_keys(Nq: int, Nk: int, _: Window, _q: int, block_k: int) -> tuple[int, list[int]]:
    """Rows that blocks of keys go through, and ranks: the first keys first."""
    return -(-Nq // 128) * 128, list(range(0, Nk, block_k))


def _key_tiles(q0: int, q1: int, Nq: int, Nk: int, window: Window, block_k: int) -> int:
    """Count the key tiles that a block of queries sees something of, pair by pair."""
    i = np.arange(q0, q1)[:, None] + Nk - Nq
    j = np.arange(Nk)
    left, right = (Nk + Nq if x is None else x for x in window)
    seen = ((j >= i - left) & (j <= i + right)).any(axis=0)
    tiles = np.flatnonzero(seen) // block_k
    return int(np.ptp(tiles)) + 1 if tiles.size else 0
