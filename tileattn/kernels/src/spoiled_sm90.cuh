// Layer 3. What is not finite in a tile of values: taken out of the tile, noted in a table in shared
// memory, and injected into the sums of those queries that see it.
#pragma once

#include "product_sm90.cuh"

// Whether one of eight elements of 16 bits is not finite.
template <class T>
__device__ inline bool has_spoiled(const uint4& x) {
    constexpr u32 EXPONENT = SPOILED<T>;
    bool spoiled = false;
    for (u32 pair : {x.x, x.y, x.z, x.w})
        spoiled |= (pair & EXPONENT) == EXPONENT || (pair >> 16 & EXPONENT) == EXPONENT;
    return spoiled;
}

// Which keys of a tile the two rows of a lane see: scores are not -infinity. A bit for each key.
template <int NT>
struct SeenKeys {
    static constexpr int WORDS = (NT + 3) / 4;
    u32 words[2][WORDS];

    template <class TileScores>
    __device__ explicit SeenKeys(const TileScores& s) {
        const Lane lane;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int w = 0; w < WORDS; ++w) {
                u32 own = 0;
#pragma unroll
                for (int n = 4 * w; n < NT && n < 4 * w + 4; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        own |= u32(s.x[0][n][2 * half + e] != -infinity<float>()) << (8 * (n % 4) + e);
                own <<= 2 * lane.t;
                own |= __shfl_xor_sync(~0u, own, 1);
                words[half][w] = own | __shfl_xor_sync(~0u, own, 2);
            }
    }
};

// Of each column of a tile the rows that hold +infinity or NaN, then those that hold -infinity or
// NaN: a bit for each.
template <int ROWS>
struct Spoiled {
    static constexpr int WORDS = (ROWS + 31) / 32;

    u32 table;

    __device__ u32 at(int column, int sign, int word) const {
        return table + ((column * 2 + sign) * WORDS + word) * 4;
    }

    // Add infinities where a row of the sums sees what was taken out of its column.
    template <int NT, int KEYS>
    __device__ void inject(Fragment<float, 1, NT>& sums, const SeenKeys<KEYS>& seen) const {
        static_assert(SeenKeys<KEYS>::WORDS == WORDS);
        const Lane lane;
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int sign = 0; sign < 2; ++sign) {
                    u32 hits[2] = {};
#pragma unroll
                    for (int w = 0; w < WORDS; ++w) {
                        u32 rows;
                        asm volatile("ld.shared.u32 %0, [%1];"
                                     : "=r"(rows)
                                     : "r"(at(8 * n + lane.column(e), sign, w))
                                     : "memory");
                        hits[0] |= rows & seen.words[0][w];
                        hits[1] |= rows & seen.words[1][w];
                    }
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        if (hits[half])
                            sums.x[0][n][2 * half + e] +=
                                sign ? -infinity<float>() : infinity<float>();
                }
    }
};

// Zero what is not finite in a tile, and note it; whether there was some in what this warp, one of
// THREADS / 32, has looked at.
template <class T, int THREADS, int ROWS, int COLUMNS>
__device__ inline bool clean(const BoxTile<ROWS, COLUMNS>& tile, const Spoiled<ROWS>& spoiled) {
    constexpr int WORDS = Spoiled<ROWS>::WORDS;
    constexpr u32 EXPONENT = SPOILED<T>;
    const int lane = threadIdx.x % WARP;
    bool some = false;
    // Eight columns of 32 rows at a time; lane n < 16 has their word n of the table.
#pragma unroll 1
    for (int i = threadIdx.x / WARP; i < WORDS * COLUMNS / 8; i += THREADS / WARP) {
        const int word = i % WORDS, column = i / WORDS * 8, row = 32 * word + lane;
        const u32 from = tile.piece(row, column);
        u32 x[4] = {};
        if (row < ROWS)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                         : "r"(from)
                         : "memory");
        u32 noted = 0;
        if (__any_sync(~0u, has_spoiled<T>({x[0], x[1], x[2], x[3]}))) {
            some = true;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const u32 shift = e % 2 * 16, bits = x[e / 2] >> shift & 0xffff;
                const bool bad = (bits & EXPONENT) == EXPONENT;
                const bool nan = bits & (0x7fff & ~EXPONENT), negative = bits >> 15;
                const u32 up = __ballot_sync(~0u, bad && (nan || !negative));
                const u32 down = __ballot_sync(~0u, bad && (nan || negative));
                if (lane / 2 == e) noted = lane % 2 ? down : up;
                if (bad) x[e / 2] &= ~(0xffffu << shift);
            }
            if (row < ROWS)
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(from), "r"(x[0]),
                             "r"(x[1]), "r"(x[2]), "r"(x[3])
                             : "memory");
        }
        if (lane < 16)
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(
                             spoiled.at(column + lane / 2, lane % 2, word)),
                         "r"(noted)
                         : "memory");
    }
    return some;
}
