// Layer 3. Work tiles of Hopper's persistent kernels, and which CTA gets which: the forward
// scheduler is static, the backward one dynamic.
#pragma once

#include "tile_scheduler.cuh"

// Tiles along the other axis that a block attends to, or is attended by: from begin to end - 1.
// Those from full_begin to full_end - 1 need no mask.
struct TileRange {
    int begin, end, full_begin, full_end;

    __device__ bool is_partial(int tile) const { return tile < full_begin || tile >= full_end; }
};

// --- forward -------------------------------------------------------------------------------------

// A block of queries of one head, or one warpgroup's share of it. Under a block mask begin and end
// index the block's sparse list, the same for all warpgroups.
struct FwdWorkTile {
    int b, h, q0, iteration;
    int begin, end;  // of the whole block
    TileRange tiles;
    bool nan_safe;   // in a NaN-safe pass
    bool all_large;  // in the third pass, where all rows count as large
    bool is_end;     // no work tile: the first pass has ended, or all have
};

__device__ inline TileRange key_tiles(const Params& p, int b, int q0, int rows) {
    const SlidingWindow window(p, b);
    const Range keys = window.key_range(q0, min(q0 + rows, int(p.Nq)));
    const Range full = window.full_key_tiles(q0, q0 + rows);
    return {keys.lo / BLOCK_K, (keys.hi + BLOCK_K - 1) / BLOCK_K, full.lo, full.hi};
}

// The key tiles that a block mask leaves to a block of queries, ascending. An entry is twice the
// tile, plus one if it is partial. A larger one than all of them ends the list.
struct BlockSparseList {
    const int* entries;

    __device__ BlockSparseList(const Params& p, const FwdWorkTile& work)
        : entries(p.kv_indices + work.b * p.kv_indices_at.b + work.h * p.kv_indices_at.h +
                  work.q0 / BLOCK_Q * p.kv_indices_at.i) {}

    // Index of the first entry from a tile on.
    __device__ int lower_bound(int tile) const {
        int lo = 0;
        for (int hi = tile; lo < hi;) {
            const int middle = (lo + hi) / 2;
            if (entries[middle] < 2 * tile)
                lo = middle + 1;
            else
                hi = middle;
        }
        return lo;
    }
};

// The work tile of this CTA's iteration, with its flags as they are; false behind the last. The
// host's LPT assignment, where there is one, replaces round robin.
__device__ inline bool get_work(const Params& p, int iteration, FwdWorkTile& work) {
    const int blocks = int((p.Nq + BLOCK_Q - 1) / BLOCK_Q), heads = int(p.B * p.Hq);
    int index = iteration * int(gridDim.x) + int(blockIdx.x);
    if (p.schedule) index = p.schedule[index];
    if (index >= blocks * heads) return false;
    const BlockCoord at(blocks, heads, int(p.head_groups), index);
    work.b = at.head / int(p.Hq), work.h = at.head % int(p.Hq), work.iteration = iteration;
    // Under a causal mask the last queries have most keys: they go first.
    work.q0 = (p.right < 0 ? at.block : blocks - 1 - at.block) * BLOCK_Q;
    work.tiles = key_tiles(p, work.b, work.q0, BLOCK_Q);
    work.begin = work.tiles.begin, work.end = work.tiles.end;
    if constexpr (HAS_BLOCK_MASK) {
        const BlockSparseList list(p, work);
        work.begin = list.lower_bound(work.begin), work.end = list.lower_bound(work.end);
    }
    return true;
}

// --- backward ------------------------------------------------------------------------------------

// A block of keys of one key head, with the query tiles of each query head that shares it.
struct BwdWorkTile {
    int b, kv, k0;
    bool is_end;  // no work tile: all have been claimed
    TileRange tiles;
};

// Claim the next work tile: long ones first, those of a head in the order of their keys. So whoever
// claimed first among the running CTAs waits for none of them. Lane 0 calls; the shuffle tells the
// compiler that the index is uniform.
__device__ inline u32 claim_work(const Params& p) {
    u32* const tile_counter = p.tile_counter + (ONLY_FLAGGED ? 1 : 0);
    return __shfl_sync(1, atomicAdd(tile_counter, 1), 0);
}

// The work tile of an index; false behind the last.
__device__ __forceinline__ bool get_work(const Params& p, u32 index, BwdWorkTile& work) {
    const int blocks = int((p.Nk + BLOCK_K - 1) / BLOCK_K), heads = int(p.B * p.Hkv);
    if (index >= u32(blocks * heads)) return false;
    const BlockCoord at(blocks, heads, int(p.head_groups), int(index));
    work.b = at.head / int(p.Hkv), work.kv = at.head % int(p.Hkv), work.k0 = at.block * BLOCK_K;
    const SlidingWindow window(p, work.b);
    const Range queries = window.query_range(work.k0, work.k0 + BLOCK_K);
    const Range full = window.full_query_tiles(work.k0, work.k0 + BLOCK_K);
    work.tiles = {queries.lo / BLOCK_Q, (queries.hi + BLOCK_Q - 1) / BLOCK_Q, full.lo, full.hi};
    return true;
}
