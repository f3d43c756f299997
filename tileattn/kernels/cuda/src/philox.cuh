// Layer 3. Counter-based random bits for dropout: Philox-4x32-10 of (batch, head, query, key). philox.py
// states the layout. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include "config.cuh"
#include "params.cuh"

struct Words {
    u32 x[4];
};

__device__ inline Words philox4x32(Words c, u32 key0, u32 key1) {
    constexpr u32 A = 0xD2511F53u, B = 0xCD9E8D57u;
    hide(key0), hide(key1);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        // Both halves of a product are one instruction. With u64 products the compiler would keep all
        // rounds in 64 bits, and add to each high half.
        c = {__umulhi(c.x[2], B) ^ c.x[1] ^ key0, c.x[2] * B, __umulhi(c.x[0], A) ^ c.x[3] ^ key1,
             c.x[0] * A};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

// The origin from which indices count, and their type: with an origin they need all 32 bits.
template <bool>
struct Origin {
    using Index = int;
    static constexpr u32 b0 = 0, h0 = 0;
    static constexpr Index i0 = 0, j0 = 0;

    __device__ Origin(const Params&, i64) {}
};
template <>
struct Origin<true> {
    using Index = u32;
    u32 b0, h0;
    Index i0, j0;

    __device__ Origin(const Params& p, i64 b)
        : b0(u32(p.origin[4 * b])),
          h0(u32(p.origin[4 * b + 1])),
          i0(u32(p.origin[4 * b + 2])),
          j0(u32(p.origin[4 * b + 3])) {}
};

// The dropout of one head.
struct Dropout : Origin<HAS_ORIGIN> {
    u32 key0, key1, threshold, head, batch;

    __device__ Dropout(const Params& p, i64 b, i64 h)
        : Origin(p, b),
          key0(u32(p.seed)),
          key1(u32(p.seed >> 32)),
          threshold(u32(p.threshold)),
          head(h0 + u32(h)),
          batch(b0 + u32(b)) {}

    // The random words of {i, i + 8} x {j, j + 8}, if bit 3 of i and j is 0. The second pair of words is
    // for i + 8.
    __device__ Words words(Index i, Index j) const {
        return philox4x32({u32(j / 16 * 8 + j % 8), u32(i / 16 * 8 + i % 8), head, batch}, key0,
                          key1);
    }
    __device__ bool keeps(int i, int j) const {
        const Index y = i0 + i, x = j0 + j;
        return words(y, x).x[y / 8 % 2 * 2 + x / 8 % 2] >= threshold;
    }

    // The random words of {i, i + 8} x {j, j + 8}, in the same order, counted from the origin.
    __device__ Words own_words(int i, int j) const {
        if constexpr (!HAS_ORIGIN) return words(i, j);
        // If the origin is a multiple of 16, one call has all four words. Otherwise each may come from
        // another call. A loop, since four copies of the generator would be long.
        const bool together = (i0 | j0) % 16 == 0;
        Words own = {};
#pragma unroll 1
        for (u32 n = 0; n < 4; ++n) {
            const Index y = i0 + i + n / 2 * 8, x = j0 + j + n % 2 * 8;
            const Words w = words(y, x);
            if (together) return w;
            const u32 one = y / 8 % 2 ? x / 8 % 2 ? w.x[3] : w.x[2] : x / 8 % 2 ? w.x[1] : w.x[0];
#pragma unroll
            for (u32 each = 0; each < 4; ++each)
                if (each == n) own.x[each] = one;
        }
        return own;
    }

    // Call visit(m, n, e, kept) for every element of a fragment at (row, column), which are multiples of
    // 16. If TRANSPOSED, rows are keys.
    template <bool TRANSPOSED, int MT, int NT, class Visit>
    __device__ void for_each(int row, int column, Visit visit) const {
#pragma unroll
        for (int n = 0; n < NT; n += 2) for_columns<TRANSPOSED, MT>(row, column, n, visit);
    }
    // The same for 16 columns: atoms n and n + 1.
    template <bool TRANSPOSED, int MT, class Visit>
    __device__ void for_columns(int row, int column, int n, Visit visit) const {
        const Lane lane;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int r = row + 16 * m + lane.g, c = column + 8 * n + lane.column(e);
                const Words w = TRANSPOSED ? own_words(c, r) : own_words(r, c);
                visit(m, n, e, w.x[0] >= threshold);
                visit(m, n, e + 2, w.x[TRANSPOSED ? 1 : 2] >= threshold);
                visit(m, n + 1, e, w.x[TRANSPOSED ? 2 : 1] >= threshold);
                visit(m, n + 1, e + 2, w.x[3] >= threshold);
            }
    }
};
