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

// The tiles that a mask leaves to a block, ascending. An entry begins with twice the tile, plus one
// if it is partial; a larger one than all of them ends the list. Without a list there are all tiles,
// partial where the kernel evaluates a mask: their indices are their numbers.
template <class Entry>
struct TileList {
    const Entry* entries = nullptr;

    __device__ TileList() {}
    __device__ TileList(const Params& p, int b, int h, int block)
        : entries(HAS_TILE_LIST && p.tile_list
                      ? reinterpret_cast<const Entry*>(p.tile_list + b * p.tile_list_at.b +
                                                       h * p.tile_list_at.h +
                                                       block * p.tile_list_at.i)
                      : nullptr) {}

    __device__ int entry(int index) const {
        return HAS_TILE_LIST && entries ? *reinterpret_cast<const int*>(entries + index)
                                        : 2 * index + HAS_TILE_LIST;
    }
    __device__ int tile(int index) const { return entry(index) / 2; }
    __device__ bool is_partial(int index) const { return entry(index) % 2; }

    // Index of the first entry from a tile on.
    __device__ int lower_bound(int tile) const {
        if (!HAS_TILE_LIST || !entries) return tile;
        int lo = 0;
        for (int hi = tile; lo < hi;) {
            const int middle = (lo + hi) / 2;
            if (entry(middle) < 2 * tile)
                lo = middle + 1;
            else
                hi = middle;
        }
        return lo;
    }
};

// --- forward -------------------------------------------------------------------------------------

// A block of queries of one head, or one warpgroup's share of it. Where there is a list of tiles,
// begin and end index it, and are the same for all warpgroups.
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

// The key tiles that a mask leaves to a block of queries.
struct KeyTileList : TileList<int> {
    __device__ KeyTileList() {}
    __device__ KeyTileList(const Params& p, const FwdWorkTile& work)
        : TileList(p, work.b, work.h, work.q0 / BLOCK_Q) {}
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
    const KeyTileList list(p, work);
    work.begin = list.lower_bound(work.begin), work.end = list.lower_bound(work.end);
    return true;
}

// --- backward ------------------------------------------------------------------------------------

// A block of keys of one key head, with the query tiles of each query head that shares it: by their
// indices from begin to end - 1.
struct BwdWorkTile {
    int b, kv, k0;
    bool is_end;  // no work tile: all have been claimed
    TileRange tiles;
};

// The query tiles that a mask leaves to a block of keys, or to one of the heads that share it.
struct alignas(8) QueryTileEntry {
    int entry;
    int rank;  // how many blocks of keys before this one the tile is left to
};
struct QueryTileList : TileList<QueryTileEntry> {
    __device__ QueryTileList(const Params& p, const BwdWorkTile& work)
        : TileList(p, work.b, work.kv, work.k0 / BLOCK_K) {}

    // How many blocks of keys before this one attend to a tile. Without a list those of its window.
    __device__ int rank(const Params& p, const BwdWorkTile& work, int index) const {
        if (HAS_TILE_LIST && entries) return entries[index].rank;
        const int row = index * BLOCK_Q;
        const Range keys =
            SlidingWindow(p, work.b).key_range(row, min(row + BLOCK_Q, int(p.Nq)));
        return work.k0 / BLOCK_K - keys.lo / BLOCK_K;
    }
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
    const QueryTileList list(p, work);
    work.tiles = {list.lower_bound(queries.lo / BLOCK_Q),
                  list.lower_bound((queries.hi + BLOCK_Q - 1) / BLOCK_Q), full.lo, full.hi};
    return true;
}
