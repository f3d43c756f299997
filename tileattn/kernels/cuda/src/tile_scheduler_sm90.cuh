// Layer 3. Work tiles of Hopper's persistent kernels, and their schedulers, which are static or dynamic.
#pragma once

#include "query_split.cuh"
#include "splits.cuh"
#include "tile_scheduler.cuh"
#include "work_order_sm90.cuh"

// The key tiles of a block of queries: begin to end - 1. Tiles full_begin to full_end - 1 need no mask.
struct TileRange {
    int begin, end, full_begin, full_end;
    bool ends_in_half;  // the second half of the last tile is masked out

    __device__ bool is_partial(int tile) const { return tile < full_begin || tile >= full_end; }
};

// The tiles of a block that are not empty, ascending. An entry begins with a TileEntry. Without a list,
// every tile is in the list at its own index, and counts as partial if the kernel evaluates a mask.
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

    __device__ TileEntry entry(int index) const {
        return {HAS_TILE_LIST && entries ? *reinterpret_cast<const int*>(entries + index)
                                         : TileEntry::of(index, HAS_TILE_LIST)};
    }
    __device__ int tile(int index) const { return entry(index).tile(); }
    __device__ bool is_partial(int index) const { return entry(index).is_partial(); }

    // The index of the first entry at or after a tile. `tiles` is the number of all tiles. Only sliding
    // windows have to search.
    __device__ int lower_bound(int tile, int tiles) const {
        if (!HAS_TILE_LIST || !entries) return tile;
        int lo = 0, hi = tile;
        if (tile == tiles) lo = hi = entry(tiles).used();
        while (lo < hi) {
            const int middle = (lo + hi) / 2;
            if (entry(middle).bits < TileEntry::of(tile, false))
                lo = middle + 1;
            else
                hi = middle;
        }
        return lo;
    }
};

// The sequence of a work tile, and its rows: all rows of a batch entry, or the rows of a packed sequence,
// which are kept here so that they are looked up only once.
template <bool>
struct WorkSequence {
    static constexpr int q_start = 0, k_start = 0;
    int b;

    // Find a block by its place in the order of work. Returns its number in its sequence.
    __device__ int find(const Params&, int entry, int place) { return b = entry, place; }
    // Take all rows of a sequence.
    __device__ void take(const Params&, int sequence) { b = sequence; }
    template <int BLOCK>
    __device__ static int blocks(const Params& p, i64 rows) {
        return block_count<BLOCK>(p, rows);
    }
    template <class Int>
    __device__ static BlockCoord coord(const Params& p, Int blocks, Int heads, Int index) {
        return {blocks, heads, Int(p.head_groups), index};
    }
    __device__ Sequence sequence(const Params& p) const { return {p, b}; }
    __device__ int entry() const { return b; }  // of the arrays
    __device__ int Nq(const Params& p) const { return int(p.Nq); }
    __device__ int Nk(const Params& p) const { return int(p.Nk); }
};
template <>
struct WorkSequence<true> {
    int b, q_start, k_start, queries, keys;

    __device__ int find(const Params& p, int, int place) {
        const PackedBlock found = p.block_order[place];
        b = found.b, q_start = found.q_start, k_start = found.k_start;
        queries = found.Nq, keys = found.Nk;
        return found.block;
    }
    __device__ void take(const Params& p, int sequence) {
        const Sequence found(p, b = sequence);
        q_start = int(found.q_start), k_start = int(found.k_start);
        queries = int(found.Nq), keys = int(found.Nk);
    }
    template <int>
    __device__ static int blocks(const Params& p, i64) {
        return p.block_order->count;
    }
    // The blocks that share the L2 cache come for all heads before the next blocks. This function is
    // short because the next work tile waits for it.
    __device__ static BlockCoord coord(const Params& p, int, int heads, int index) {
        const int share = heads / int(p.Hkv);
        const PackedBlock& any = p.block_order[index / heads];
        const int most = any.heads * share, blocks = any.together, within = index - any.first * heads;
        const int group = within / (blocks * most), first = group * most;
        const int members = min(most, heads - first), rest = within - blocks * first;
        return {any.first + rest / members, first + rest % members};
    }
    __device__ Sequence sequence(const Params&) const {
        return {b, q_start, k_start, queries, keys};
    }
    __device__ int entry() const { return 0; }
    __device__ int Nq(const Params&) const { return queries; }
    __device__ int Nk(const Params&) const { return keys; }
};

// --- forward -------------------------------------------------------------------------------------

// A block of queries of one head, or the part of a warpgroup. With a tile list, begin and end are indices
// into it, the same for all warpgroups.
struct FwdWorkTile : WorkSequence<PACKED>, WorkPart<TOTALS> {
    int h, q0, iteration;
    int split;       // of the keys, where h is the first query head of a key head
    bool nan_safe;   // in a NaN-safe pass
    bool all_max_first;  // in the third pass, where all rows count as large
    bool is_end;     // no work tile: the first pass has ended, or all passes have
    int begin, end;  // of the whole block
    TileRange tiles;

    __device__ void keep(const SlidingWindow&) {}
};
// A work tile with its window, so that consumers of the forward kernel need not compute it again.
struct alignas(16) WindowedWorkTile : FwdWorkTile {
    SlidingWindow window;

    __device__ void keep(const SlidingWindow& found) { window = found; }
};

// The key tiles of some rows of a work tile, from `row` on.
__device__ inline TileRange key_tiles(const Params& p, const FwdWorkTile& work,
                                      const SlidingWindow& window, int row, int rows) {
    const int group = SPLIT_KV ? int(p.group) : 1;
    const int q0 = row / group, q1 = (row + rows + group - 1) / group;
    const Range keys = window.key_range(q0, min(q1, window.Nq));
    const Range full = window.full_key_tiles(q0, q1);
    TileRange tiles{keys.lo / BLOCK_K, (keys.hi + BLOCK_K - 1) / BLOCK_K, full.lo, full.hi};
    tiles.ends_in_half = keys.hi <= tiles.end * BLOCK_K - BLOCK_K / 2;
    if constexpr (SPLIT_KV) {
        const int each = int(p.split_keys) / BLOCK_K, first = work.split * each;
        tiles.begin = max(tiles.begin, first), tiles.end = min(tiles.end, first + each);
        tiles.ends_in_half = false;
    }
    return tiles;
}

// The key tiles of a block of queries that are not empty.
struct KeyTileList : TileList<int> {
    __device__ KeyTileList() {}
    __device__ KeyTileList(const Params& p, const FwdWorkTile& work)
        : TileList(p, work.b, work.h, work.q0 / BLOCK_Q) {}
};

// The first `single_heads` heads come one by one, the others in groups (L2 swizzle).
__device__ inline BlockCoord forward_coord(const Params& p, const WorkSequence<PACKED>& sequence,
                                           int blocks, int heads, int index) {
    const int single = PACKED ? 0 : int(p.single_heads), grouped_index = index - single * blocks;
    if (grouped_index < 0) return {index % blocks, index / blocks};
    BlockCoord at = sequence.coord(p, blocks, heads - single, grouped_index);
    at.head += single;
    return at;
}

// Find the work tile of an index, with all key tiles of its window; flags stay as they are. Returns false
// after the last work tile.
template <class Work>
__device__ inline bool get_work(const Params& p, int index, Work& work) {
    const int blocks = work.template blocks<BLOCK_Q>(p, p.Nq), heads = int(p.B * p.Hq);
    if (index >= blocks * heads) return false;
    const BlockCoord at = forward_coord(p, work, blocks, heads, index);
    // Longest first: with a causal mask the last queries have most keys. Dynamic work tiles with a list are
    // taken in the same order, since most masks are causal.
    const bool last_first = p.right >= 0 || (HAS_TILE_LIST && p.next_tiles);
    const int place = PACKED || !last_first ? at.block : blocks - 1 - at.block;
    work.q0 = work.find(p, at.head / int(p.Hq), place) * BLOCK_Q;
    work.h = at.head % int(p.Hq);
    const SlidingWindow window(p, work.sequence(p));
    work.keep(window);
    work.tiles = key_tiles(p, work, window, work.q0, BLOCK_Q);
    work.begin = work.tiles.begin, work.end = work.tiles.end;
    return true;
}
// Find the next work tile of a worker.
template <class Work>
__device__ inline bool get_work(const Params& p, WorkOrder<false>& order, Work& work) {
    if (!get_work(p, order.next(p), work)) return false;
    work.iteration = order.iteration;
    const KeyTileList list(p, work);
    const int tiles = block_count<BLOCK_K>(p, p.Nk);
    work.begin = list.lower_bound(work.begin, tiles), work.end = list.lower_bound(work.end, tiles);
    return true;
}
template <class Work>
__device__ inline bool get_work(const Params& p, WorkOrder<true>& order, Work& work) {
    if (!order.next(p)) return false;
    work.take(p, order.b);
    work.h = order.kv * int(p.group), work.q0 = order.block * BLOCK_Q;
    work.split = order.split, work.iteration = order.iteration;
    const SlidingWindow window(p, work.sequence(p));
    work.keep(window);
    work.tiles = key_tiles(p, work, window, work.q0, BLOCK_Q);
    work.begin = work.tiles.begin, work.end = work.tiles.end;
    return true;
}

// --- backward ------------------------------------------------------------------------------------

// True if calls may take the last keys first.
constexpr bool MAY_BEGIN_LAST = BLOCK_Q == BLOCK_K && !PACKED && !HAS_TILE_LIST;

// The query tiles of a block of keys, by index: from `first`, up or down, and before `stop`. Packed
// sequences always go down.
struct QueryTiles {
    int first, stop;
    Range full;  // tiles that need no mask

    __device__ bool is_empty() const { return first == stop; }
    __device__ int next(int index) const {
        return !PACKED && index < stop ? index + 1 : index - 1;
    }
    __device__ bool is_partial(int tile) const { return tile < full.lo || tile >= full.hi; }
};

// A block of keys of one key head, with the query tiles of each query head that shares it.
//
// The blocks of a head are claimed from the first keys on, and each starts with its last query tile: then
// all blocks reach a tile at about the same time, even with a causal mask. With `run_keys`, the blocks of
// every second run of that many keys start with their first tile, on the diagonal. With `last_keys_first`
// all blocks do, and the last keys come first: blocks that start together reach a tile one after another,
// in the order in which they add to its dQ.
struct BwdWorkTile : WorkSequence<PACKED>, QuerySplit<SPLIT_Q> {
    int kv, k0;
    bool is_end;  // no work tile: all have been claimed
    QueryTiles tiles;
    SlidingWindow window;

    __device__ int first_head(const Params& p) const { return kv * int(p.group) + QuerySplit::begin(); }
    __device__ int end_head(const Params& p) const { return kv * int(p.group) + QuerySplit::end(p); }
    // The index of its first query tile among the tiles of a head, and of its first query in lse_log2 and
    // delta.
    __device__ int first_tile() const { return PACKED ? q_start / BLOCK_Q + b : 0; }
    __device__ int first_statistic() const {
        return int(padded_start(q_start, b));
    }
};

// The query tiles of a block of keys that are not empty, for all heads that share it or for one.
struct alignas(8) QueryTileEntry {
    int entry;
    int rank;  // number of earlier key blocks that the tile attends to
};
struct QueryTileList : TileList<QueryTileEntry> {
    __device__ QueryTileList(const Params& p, const BwdWorkTile& work)
        : TileList(p, work.b, work.kv, work.k0 / BLOCK_K) {}

    // The number of key blocks claimed before this one that add to a dQ tile. Without a list, the window
    // decides.
    __device__ int rank(const Params& p, const BwdWorkTile& work, int index) const {
        if (HAS_TILE_LIST && entries) return entries[index].rank;
        const int row = tile(index) * BLOCK_Q, block = work.k0 / BLOCK_K;
        const Range keys = work.window.key_range(row, min(row + BLOCK_Q, work.window.Nq));
        if (MAY_BEGIN_LAST && p.last_keys_first) return (keys.hi - 1) / BLOCK_K - block;
        return block - keys.lo / BLOCK_K;
    }
};

// Claim the next work tile; only lane 0 calls. The work tiles of a head are claimed in the order in which
// they add to each dQ tile, by rising ranks. So the first claimed of all unfinished work tiles never waits,
// and there is no deadlock, however few CTAs are resident.
__device__ inline u32 claim_work(const Params& p) {
    u32* const tile_counter = p.tile_counter + (ONLY_FLAGGED ? 1 : 0);
    return uniform(atomicAdd(tile_counter, 1), 1);
}

// Staggered heads start evenly spaced, so that long blocks run beside short ones: block b of head h has the
// index h * blocks + b * stagger. Indices of no head, at both ends, give a block past the last.
__device__ inline BlockCoord staggered_coord(const Params& p, int blocks, int heads, int index) {
    const int block = index % blocks * int(p.inverse_stagger) % blocks;
    const int head = (index - block * int(p.stagger)) / blocks;
    return u32(head) < u32(heads) ? BlockCoord(block, head) : BlockCoord(blocks, 0);
}

// Find the work tile of an index. Returns false after the last.
__device__ __forceinline__ bool get_work(const Params& p, u32 index, BwdWorkTile& work) {
    // For the schedule a split is a key head.
    const int splits = split_count(p), blocks = work.blocks<BLOCK_K>(p, p.Nk);
    const int heads = int(p.B * p.Hkv) * splits;
    if (index >= u32(blocks * heads + (blocks - 1) * int(p.stagger))) return false;
    const BlockCoord at = !PACKED && p.stagger ? staggered_coord(p, blocks, heads, int(index))
                                                    : work.coord(p, u32(blocks), u32(heads), index);
    const bool last_first = MAY_BEGIN_LAST && p.last_keys_first;
    const int place = last_first ? blocks - 1 - at.block : at.block;
    const u32 head = u32(at.head) / u32(splits);
    static_cast<QuerySplit<SPLIT_Q>&>(work) = {p, int(u32(at.head) % u32(splits))};
    work.k0 = work.find(p, head / u32(p.Hkv), place) * BLOCK_K;
    work.kv = head % u32(p.Hkv);
    const SlidingWindow window = work.window = SlidingWindow(p, work.sequence(p));
    const Range queries = work.clip(p, window.query_range(work.k0, work.k0 + BLOCK_K));
    Range full = window.full_query_tiles(work.k0, work.k0 + BLOCK_K);
    // Rows past the end of a packed sequence belong to the next one.
    if (PACKED) full.hi = min(full.hi, work.Nq(p) / BLOCK_Q);
    const QueryTileList list(p, work);
    const int tiles = block_count<BLOCK_Q>(p, p.Nq);
    const int begin = list.lower_bound(queries.lo / BLOCK_Q, tiles);
    const int end = max(begin, list.lower_bound((queries.hi + BLOCK_Q - 1) / BLOCK_Q, tiles));
    const u32 run = p.run_keys;
    const bool rises = last_first || (!PACKED && run && u32(work.k0) / run % 2);
    work.tiles = {rises ? begin : end - 1, rises ? end : begin - 1, full};
    return true;
}

// Call visit(index, begin, end) for each query tile of a work tile. The query heads begin to end - 1 are
// computed before the next tile: all heads of the work tile, or with HEAD_MAJOR one. The first
// `left_out` heads are skipped at the first tile.
template <class Visit>
__device__ __forceinline__ void for_each_index(const Params& p, const BwdWorkTile& work, Visit visit,
                                               int left_out = 0) {
    const QueryTiles& tiles = work.tiles;
    const int first_head = work.first_head(p), end_head = work.end_head(p);
    auto go = [&](int first, int end) {
        int begin = first + left_out;
#pragma unroll 1
        for (int index = tiles.first; index != tiles.stop; index = tiles.next(index), begin = first)
            visit(index, begin, end);
        left_out = 0;
    };
    if constexpr (HEAD_MAJOR) {
#pragma unroll 1
        for (int h = first_head; h < end_head; ++h) go(h, h + 1);
    } else {
        go(first_head, end_head);
    }
}
