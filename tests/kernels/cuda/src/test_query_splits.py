"""Sums that splits of the queries of a key block join, on the CPU."""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.cuda.src.on_host import Array, built, pointer, sources

_SUMS = 4  # floats of a split; the room that the kernel reserves is BLOCK_K * 2 * HEAD_DIM

_STAND_INS = """\
#pragma once
#include "types.cuh"

using Accum = float;
constexpr bool SPLIT_Q = true, PACKED = false, PAIR = false;
constexpr int BLOCK_Q = 64, BLOCK_K = 1, HEAD_DIM = 2, VALUE_DIM = 2, THREADS = 1;
struct Range { int lo, hi; };
struct Params {
    i64 Nq, group, head_splits, split_heads, query_splits;
    void* split_sums;
    u32* split_semaphores;
};
template <int BLOCK> int block_count(const Params&, i64 rows) { return int(rows / BLOCK); }
template <class S, int MT, int NT> struct Fragment { S x[MT][NT][4]; };
"""

_SEMAPHORES = """\
#pragma once
inline void add_to_semaphore(u32* place, u32 value) { *place += value; }
inline u32 read_semaphore(const u32* place) { return *place; }
inline u32 claim_semaphore(u32* place, u32 value) {
    const u32 before = *place;
    if (!before) *place = value;
    return before;
}
"""

_JOIN = """\
#include "query_split_sums.cuh"

// Let splits end one after another in some order. Returns the last, whose sums are all.
extern "C" int join(int block, int splits, const int* order, float* sums, void* memory,
                    u32* semaphores) {
    const Params p{0, splits, splits, 1, 1, memory, semaphores};
    int last = -1;
    for (int n = 0; n < splits; ++n) {
        Fragment<float, 1, 1> own;
        float* const given = sums + 4 * order[n];
        std::copy(given, given + 4, own.x[0][0]);
        const auto team = split_team<1>(p, block, order[n], 0, 0, [](bool x) { return x; });
        if (!team.join(own)) continue;
        if (last >= 0) return -2;
        last = order[n];
        std::copy(own.x[0][0], own.x[0][0] + 4, given);
    }
    return last;
}
"""


@cache
def library(folder: Path) -> ctypes.CDLL:
    texts = sources("query_split.cuh", "query_split_sums.cuh")
    texts |= {"mask.cuh": _STAND_INS, "tma_sm90.cuh": _SEMAPHORES, "join.cpp": _JOIN}
    return built(folder, texts, "join.cpp")


def tree_sum(parts: list[Array]) -> Array:
    """Add the parts in pairs, and the pairs in pairs; one without a partner stays as it is."""
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(parts) & -2 :]
    return parts[0]


@pytest.mark.parametrize("splits", [2, 3, 4, 5, 8, 13])
def test_sums_do_not_depend_on_which_split_ends_first(splits: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(splits)
    join = library(tmp_path).join
    parts = rng.normal(size=(splits, _SUMS)).astype(np.float32)
    expected = tree_sum([*parts])
    for block in range(6):
        memory = np.full((block + 1, splits - 1, _SUMS), np.nan, np.float32)
        semaphores = np.zeros((block + 1, splits - 1), np.uint32)
        order, sums = rng.permutation(splits).astype(np.int32), parts.copy()
        last = join(block, splits, *map(pointer, (order, sums, memory, semaphores)))
        assert last == order[-1]
        assert sums[last].tobytes() == expected.tobytes()
        assert not semaphores[:block].any()
        assert (semaphores[block] == 2).all()
