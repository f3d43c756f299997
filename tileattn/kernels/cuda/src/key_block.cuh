// Layer 3. A block of keys in the backward pass: its tiles, and how warps share the GEMMs.
#pragma once

#include "gradient.cuh"
#include "pair.cuh"
#include "planes.cuh"
#include "query_split_sums.cuh"
#include "tile_scheduler.cuh"

constexpr int WARPS = WARPS_M * WARPS_N;

// The number of warps side by side, for a GEMM of ROWS x COLUMNS divided among SHARED_BY warps: minimise
// the atoms of a warp, then the operands to load.
template <int ROWS, int COLUMNS, int SHARED_BY = WARPS>
constexpr int across() {
    int best = 1, least = ROWS * COLUMNS;
    for (int n = 1; n <= SHARED_BY && COLUMNS % (16 * n) == 0; n *= 2) {
        const int m = SHARED_BY / n;
        const int rows = (ROWS + 16 * m - 1) / (16 * m), columns = COLUMNS / (16 * n);
        const int cost = 64 * rows * columns + rows + columns;
        if (ROWS % (16 * rows) == 0 && cost <= least) best = n, least = cost;
    }
    return best;
}

// A warp's part of such a GEMM, at (row, column). If there are many warps, some have no part.
template <int ROWS, int COLUMNS, int ACROSS, int SHARED_BY = WARPS>
struct WarpTile {
    static constexpr int MT = (ROWS * ACROSS + 16 * SHARED_BY - 1) / (16 * SHARED_BY);
    static constexpr int NT = COLUMNS / (8 * ACROSS);
    static_assert(ROWS % (16 * MT) == 0 && NT % 2 == 0, "whole pairs of atoms, or none");
    // True if all warps have a part.
    static constexpr bool ALL = ROWS * ACROSS == 16 * MT * SHARED_BY;
    int row, column;

    __device__ explicit WarpTile(int warp)
        : row(warp / ACROSS * MT * 16), column(warp % ACROSS * NT * 8) {}
    __device__ bool any() const { return row < ROWS; }
};

using KeyTile = Tile<Operand, BLOCK_K, tile_columns(HEAD_COLUMNS)>;
using ValueTile = Tile<Operand, BLOCK_K, tile_columns(VALUE_COLUMNS)>;
using QueryTile = Tile<Operand, BLOCK_Q, tile_columns(HEAD_COLUMNS)>;
using DoutTile = Tile<Operand, BLOCK_Q, tile_columns(VALUE_COLUMNS)>;
using ScoreTile = Tile<Element, BLOCK_K, BLOCK_Q>;

struct KeyBlock : HeadBlock<BLOCK_K> {
    int split;  // of its queries

    __device__ KeyBlock(const Params& p, const BlockCoord& coord)
        : HeadBlock(p, p.key_ends(), int(p.Hkv), coord.head / split_count(p), coord.block),
          split(coord.head % split_count(p)) {}
};
__device__ inline KeyBlock block_of(const Params& p, int index) {
    return {p, BlockCoord(block_count<BLOCK_K>(p, p.Nk), int(p.B * p.Hkv) * split_count(p),
                          int(p.head_groups), index)};
}

// Join the sums of all splits of a block. Returns true in the last CTA, which has them all then.
template <class... Sums>
__device__ inline bool join_splits(const Params& p, const KeyBlock& at, Sums&... sums) {
    const i64 block = (i64(at.b) * p.Hkv + at.h) * block_count<BLOCK_K>(p, p.Nk) + at.block;
    auto any = [](bool holds) { return bool(__syncthreads_or(holds)); };
    return split_team<1>(p, block, at.split, 0, threadIdx.x, any).join(sums...);
}

// Start to load the keys and values of a block, from columns d0 and dv0 on.
template <class Keys, class Values>
__device__ inline void load_key_block(const Params& p, const Sequence& sequence, const SlidingWindow& window, int kv,
                                      int k0, const Keys& k_tile, int d0, const Values& v_tile, int dv0) {
    k_tile.template load<THREADS, ALIGNMENT_BYTES>(
        sequence.keys<Element>(p.k, p.k_at, kv) + k0 * p.k_at.n + d0, p.k_at.n, window.length - k0,
        int(p.D) - d0);
    v_tile.template load<THREADS, ALIGNMENT_BYTES>(
        sequence.keys<Element>(p.v, p.v_at, kv) + k0 * p.v_at.n + dv0, p.v_at.n, window.length - k0,
        int(p.Dv) - dv0);
    copy_commit();
}
