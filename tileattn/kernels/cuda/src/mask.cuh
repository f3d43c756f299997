// Layer 3. The attention mask: of elements, ranges and tiles. As mask.py.
#pragma once

#include "sequence.cuh"

constexpr int EMPTY = 0, PARTIAL = 1, FULL = 2;

// An entry of a list of tiles that are not empty: 2 * tile + partial. A list has one entry more than there
// are tiles; each unused entry holds END minus the number of used ones. As in tile_lists.py.
struct TileEntry {
    static constexpr int END = 0x7fffffff;
    int bits = 0;

    __device__ static int of(int tile, int partial) { return 2 * tile + partial; }
    __device__ static int end(int used) { return END - used; }
    __device__ int tile() const { return bits / 2; }
    __device__ bool is_partial() const { return bits % 2; }
    __device__ int used() const { return END - bits; }  // of an unused entry
};

// A block of a block mask. The host writes -1 for an empty block, -FULL for a full one, and for a partial
// one the index of its bits.
struct MaskBlock {
    int entry;

    __device__ bool is_empty() const { return entry == EMPTY - 1; }
    __device__ bool is_full() const { return entry == -FULL; }
    __device__ bool is_partial() const { return entry >= 0; }
};

constexpr int FAR = 1 << 30;  // larger than every index of a query or key, by some tiles

struct Range {
    int lo, hi;
};

// The sliding window: query i attends to keys i + begin to i + end - 1, as far as they are in 0 to length -
// 1.
struct SlidingWindow {
    int Nq, length, begin, end;

    SlidingWindow() = default;
    __device__ SlidingWindow(const Params& p, const Sequence& sequence) {
        const i64 offset = sequence.offset(p);
        Nq = int(sequence.Nq);
        length = int(sequence.length(p));
        begin = p.left < 0 ? -FAR : clamp(offset - p.left);
        end = p.right < 0 ? FAR : clamp(offset + p.right + 1);
    }
    __device__ SlidingWindow(int Nq, int length, int begin, int end)
        : Nq(Nq), length(length), begin(begin), end(end) {}
    __device__ static int clamp(i64 x) { return int(min(max(x, i64(-FAR)), i64(FAR))); }

    __device__ bool visible(int i, int j) const {
        // Unsigned arithmetic: one comparison checks both bounds.
        return u32(j - i) - u32(begin) < u32(end) - u32(begin) && u32(j) < u32(length);
    }
    // The smallest range with all keys that queries q0 to q1 - 1 attend to.
    __device__ Range key_range(int q0, int q1) const {
        const int lo = max(0, q0 + begin), hi = min(length, q1 - 1 + end);
        return q0 < q1 && lo < hi ? Range{lo, hi} : Range{0, 0};
    }
    // The smallest range with all queries that attend to one of the keys k0 to k1 - 1.
    __device__ Range query_range(int k0, int k1) const {
        const int k_end = min(k1, length);
        const int lo = max(0, k0 - end + 1), hi = min(Nq, k_end - begin);
        return k0 < k_end && lo < hi ? Range{lo, hi} : Range{0, 0};
    }
    __device__ int kind(int q0, int q1, int k0, int k1) const {
        const Range some = key_range(q0, q1);
        if (k0 >= some.hi || k1 <= some.lo) return EMPTY;
        return is_full(q0, q1, k0, k1) ? FULL : PARTIAL;
    }
    // Key tiles that are full for queries q0 to q1 - 1.
    __device__ Range full_key_tiles(int q0, int q1) const {
        const int lo = max(0, q1 - 1 + begin), hi = min(length, q0 + end);
        return {(lo + BLOCK_K - 1) / BLOCK_K, hi / BLOCK_K};
    }
    // Query tiles that are full for keys k0 to k1 - 1. Queries past the end do not matter.
    __device__ Range full_query_tiles(int k0, int k1) const {
        const int lo = max(0, k1 - end), hi = k0 + 1 - begin;
        if (k1 > length) return {0, 0};
        return {(lo + BLOCK_Q - 1) / BLOCK_Q, (hi < Nq ? hi : Nq + BLOCK_Q - 1) / BLOCK_Q};
    }
    // True if each of the queries q0 to q1 - 1 attends to each of the keys k0 to k1 - 1.
    __device__ bool is_full(int q0, int q1, int k0, int k1) const {
        const int lo = max(0, q1 - 1 + begin), hi = min(length, q0 + end);
        return k0 >= lo && k1 <= hi;
    }
};

// The attention mask of one head: window, dense mask, block mask and mask_mod.
struct AttentionMask {
    SlidingWindow window;
    const bool* mask;
    i64 mask_i, mask_j;
    const int* kinds;
    i64 kinds_i;
    const bool* bits;
    MaskFunction function;
    const signed char* tile_kinds;
    i64 tile_kinds_i, tile_kinds_j;
    int Nq, Nk, block_q, block_k, tile_q, tile_k, group;

    __device__ AttentionMask(const Params& p, i64 b, i64 h)
        : AttentionMask(p, Sequence(p, b), h) {}
    __device__ AttentionMask(const Params& p, const Sequence& sequence, i64 h)
        : AttentionMask(p, sequence, SlidingWindow(p, sequence), h) {}
    __device__ AttentionMask(const Params& p, const Sequence& sequence, const SlidingWindow& window,
                             i64 h)
        : AttentionMask(p, sequence, window, sequence.b, h) {}
    __device__ AttentionMask(const Params& p, const Sequence& sequence, const SlidingWindow& window,
                             i64 b, i64 h)
        : window(window),
          mask(static_cast<const bool*>(p.mask) +
               (HAS_MASK ? b * p.mask_at.b + h * p.mask_at.h : 0)),
          mask_i(p.mask_at.i),
          mask_j(p.mask_at.j),
          kinds(p.block_kinds +
                (HAS_BLOCK_MASK ? b * p.block_kinds_at.b + h * p.block_kinds_at.h : 0)),
          kinds_i(p.block_kinds_at.i),
          bits(p.block_bits),
          function(p, b, h),
          tile_kinds(p.tile_kinds +
                     (HAS_MASK_MOD ? b * p.tile_kinds_at.b + h * p.tile_kinds_at.h : 0)),
          tile_kinds_i(p.tile_kinds_at.i),
          tile_kinds_j(p.tile_kinds_at.j),
          Nq(int(sequence.Nq)),
          Nk(int(sequence.Nk)),
          block_q(int(p.mask_block_q)),
          block_k(int(p.mask_block_k)),
          tile_q(int(p.kinds_tile_q)),
          tile_k(int(p.kinds_tile_k)),
          group(int(p.group)) {}

    // The query of a row of a tile. With SPLIT_KV a row is a query of one head.
    __device__ int query(int row) const { return SPLIT_KV ? row / group : row; }

    // True if query i < Nq attends to key j.
    __device__ bool visible(int i, int j) const {
        return window.visible(i, j) && (!HAS_MASK || mask[i * mask_i + j * mask_j]) &&
               (!HAS_BLOCK_MASK || in_blocks(i, j)) && (!HAS_MASK_MOD || by_function(i, j));
    }

    // True if mask_mod lets query i attend to key j. Indices past the end count as the last.
    __device__ bool by_function(int i, int j) const {
        return function.visible(min(i, Nq - 1), min(j, Nk - 1));
    }

    // True if the block mask lets query i attend to key j. Indices past the end count as the last.
    __device__ bool in_blocks(int i, int j) const {
        const int row = min(i, Nq - 1), key = min(j, Nk - 1);
        const MaskBlock block{kinds[row / block_q * kinds_i + key / block_k]};
        return block.is_full() ||
               (block.is_partial() &&
                bits[(i64(block.entry) * block_q + row % block_q) * block_k + key % block_k]);
    }

    // The kind of a tile according to mask_mod. tile_kinds may have tiles of another size, or be null.
    __device__ int kind_by_function(int q0, int q1, int k0, int k1) const {
        if (!tile_kinds) return PARTIAL;
        int least = FULL, most = EMPTY;
        for (int r = q0 / tile_q; r <= (q1 - 1) / tile_q; ++r)
            for (int c = k0 / tile_k; c <= (k1 - 1) / tile_k; ++c) {
                const int kind = tile_kinds[r * tile_kinds_i + c * tile_kinds_j];
                least = min(least, kind), most = max(most, kind);
            }
        return most == EMPTY ? EMPTY : least == FULL ? FULL : PARTIAL;
    }

    // The kind of a tile.
    __device__ int kind(int q0, int q1, int k0, int k1) const {
        int kind = window.kind(q0, min(q1, Nq), k0, k1);
        if (HAS_MASK && kind == FULL) kind = PARTIAL;
        if constexpr (HAS_MASK_MOD) {
            if (kind == EMPTY) return EMPTY;
            kind = min(kind, kind_by_function(q0, min(q1, Nq), k0, min(k1, Nk)));
        }
        if constexpr (HAS_BLOCK_MASK) {
            if (kind == EMPTY) return EMPTY;
            bool some = false, all = true;
            const int last_q = (min(q1, Nq) - 1) / block_q, last_k = (min(k1, Nk) - 1) / block_k;
            for (int r = q0 / block_q; r <= last_q; ++r)
                for (int c = k0 / block_k; c <= last_k; ++c) {
                    const MaskBlock block{kinds[r * kinds_i + c]};
                    some = some || !block.is_empty();
                    all = all && block.is_full();
                }
            return !some ? EMPTY : all ? kind : PARTIAL;
        }
        return kind;
    }
};
