// Layer 3. NaN-safe GEMMs. P = 0 does not mask out a NaN, since 0 x NaN is NaN. So non-finite values are
// replaced by 0 before the GEMM, and a table records them. After the GEMM, rows that attend to such a value
// get NaN or the infinity that it was.
#pragma once

#include "config.cuh"

// 16 bytes of a row of a tile.
template <class T>
union Chunk {
    static constexpr int SIZE = 16 / int(sizeof(T));
    u32 words[4];
    T elements[SIZE];

    // Adding the lowest bit of the exponent to an exponent of all ones carries into the sign bit. Only
    // every second word of a double has an exponent.
    __device__ bool all_finite() const {
        constexpr u32 EXPONENT = sizeof(T) == 8       ? 0x7ff00000
                                 : sizeof(T) == 4     ? 0x7f800000
                                 : HAS_FINITE_SUMS<T> ? 0x7c007c00
                                                      : 0x7f807f80;
        constexpr u32 LOWEST = EXPONENT & ~(EXPONENT << 1);
        constexpr u32 SIGN = sizeof(T) == 2 ? 0x80008000 : 0x80000000;
        u32 carries = 0;
#pragma unroll
        for (int w = sizeof(T) == 8; w < 4; w += sizeof(T) == 8 ? 2 : 1)
            carries |= (words[w] & EXPONENT) + LOWEST;
        return !(carries & SIGN);
    }
};

struct NoRecord {
    __device__ void operator()(int, int, u32) const {}
};

// Copy a tile, or rewrite it in place, with zeros for non-finite values. Returns true if there were any.
// `warp` is one of WARPS warps, which the caller synchronises before and after. A warp reads 16 bytes of 32
// rows at a time. record(column, n, bits) describes rows 16 n to 16 n + 15 of a column: the lower half of
// the bits marks +infinity or NaN, the upper half -infinity or NaN.
template <class T, int ROWS, int COLUMNS, int WARPS, bool IN_PLACE, class AnyTile,
          class Record = NoRecord>
__device__ inline bool zero_non_finite(const AnyTile& to, const AnyTile& from, int warp,
                                       Record record = {}) {
    static_assert(ROWS % 16 == 0);
    constexpr int CHUNKS = COLUMNS / Chunk<T>::SIZE, UNITS = (ROWS + 31) / 32 * CHUNKS;
    const int lane = threadIdx.x % WARP;
    bool found = false;
#pragma unroll 1
    for (int unit = warp; unit < UNITS; unit += WARPS) {
        const int row = unit / CHUNKS * 32 + lane, column = unit % CHUNKS * Chunk<T>::SIZE;
        const int byte = column * int(sizeof(T));
        Chunk<T> chunk;
        load_shared(chunk.words, from.chunk(min(row, ROWS - 1), byte));
        const bool good = row >= ROWS || chunk.all_finite();
        u32 mine = 0;  // the marks of one column and 16 rows
        if (!__all_sync(~0u, good)) {
            found = true;
#pragma unroll
            for (int e = 0; e < Chunk<T>::SIZE; ++e) {
                T& element = chunk.elements[e];
                const auto x = widen(element);
                const u32 plus = __ballot_sync(~0u, !(x < infinity<Accum>()));
                const u32 minus = __ballot_sync(~0u, !(x > -infinity<Accum>()));
                if (lane / 2 == e) mine = __byte_perm(plus, minus, lane % 2 ? 0x7632 : 0x5410);
                if (!is_finite(x)) element = T{};
            }
        }
        if (!good || (!IN_PLACE && row < ROWS)) store_shared(to.chunk(row, byte), chunk.words);
        const int n = row / 32 * 2 + lane % 2;
        if (lane < 2 * Chunk<T>::SIZE && n < ROWS / 16) record(column + lane / 2, n, mine);
    }
    return found;
}

// The table of the non-finite values of a tile: for each column, a word of marks for each 16 rows.
template <class T, int ROWS, int COLUMNS>
struct NonFinite {
    static constexpr int WORDS = ROWS / 16, BYTES = COLUMNS * WORDS * 4;

    u32 address;  // in shared memory, a multiple of 4

    // Replace the non-finite values of a tile by 0, and fill the table. Returns true if there were any.
    template <int WARPS, bool RECORD = true, class AnyTile>
    __device__ bool clean(const AnyTile& tile, int warp) const {
        return zero_non_finite<T, ROWS, COLUMNS, WARPS, true>(
            tile, tile, warp, [&](int column, int n, u32 bits) {
                if (RECORD) store_shared(at(column) + 4 * n, bits);
            });
    }

    __device__ u32 at(int column) const { return address + column * (WORDS * 4); }
};

// The attended pairs of a warp's scores, kept or dropped: a bit for each element of MT x NT atoms.
template <int MT, int NT>
struct Attended {
    static_assert(NT % 2 == 0);
    static constexpr int PARTS = (NT + 15) / 16;
    static_assert(PARTS <= 2);
    u32 kept[MT][2][PARTS] = {}, dropped[MT][2][PARTS] = {};

    __device__ static u32 bit(int n, int e) { return 1u << (n % 16 * 2 + e % 2); }

    __device__ void keep(int m, int n, int e, bool yes) {
        kept[m][e / 2][n / 16] |= yes ? bit(n, e) : 0;
    }
    // Mark an element, if it was kept, as dropped.
    __device__ void drop(int m, int n, int e) {
        const u32 moved = kept[m][e / 2][n / 16] & bit(n, e);
        kept[m][e / 2][n / 16] ^= moved, dropped[m][e / 2][n / 16] |= moved;
    }

    // Mark the scores that are not -infinity. Returns true if all are attended.
    __device__ bool mark(const Fragment<Accum, MT, NT>& scores) {
        bool all = true;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const bool yes = scores.x[m][n][e] != -infinity<Accum>();
                    keep(m, n, e, yes);
                    all = all && yes;
                }
        return all;
    }

    // Set the masked-out elements, in the columns of atoms begin to end - 1.
    __device__ void fill_others(Fragment<Accum, MT, NT>& x, Accum number, int begin = 0,
                                int end = NT) const {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = begin; n < end; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (!(kept[m][e / 2][n / 16] & bit(n, e))) x.x[m][n][e] = number;
    }

    // The bits of a row and 16 columns, the atoms 2 * w and 2 * w + 1: kept columns in the lower half,
    // dropped ones in the upper half. All lanes call.
    __device__ u32 word(int m, int half, int w) const {
        auto spread = [&](const u32(&bits)[PARTS]) {
            const u32 four = (w < 8 ? bits[0] : bits[PARTS - 1]) >> (w % 8 * 4);
            return (four & 3) | (four & 12) << 6;
        };
        u32 x = spread(kept[m][half]);
        if constexpr (HAS_DROPOUT) x |= spread(dropped[m][half]) << 16;
        x <<= 2 * Lane().t;
        x |= __shfl_xor_sync(~0u, x, 1);
        return x | __shfl_xor_sync(~0u, x, 2);
    }
};

// The same words for whole rows, in shared memory, if warps share rows. Rows are PITCH bytes apart.
template <int PITCH>
struct AttendedRows {
    u32 address;

    __device__ u32 at(int row, int w) const { return address + row * PITCH + 4 * w; }

    // Store a warp's part, at (row0, column0). The caller then synchronises the warps of a row.
    template <int MT, int NT>
    __device__ void store(const Attended<MT, NT>& attended, int row0, int column0) const {
        const Lane lane;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int w = 0; w < NT / 2; ++w) {
                    const u32 x = attended.word(m, half, w);
                    const int row = row0 + 16 * m + lane.row(2 * half);
                    if (lane.t == 0) store_shared(at(row, column0 / 16 + w), x);
                }
    }
};

// Add the non-finite values of a cleaned tile to an accumulator fragment at column0: to each row those that
// it attends to. word_of(m, half, w) returns the words of Attended. Dropped values are multiplied by 0,
// which turns infinity into NaN.
template <class T, int ROWS, int COLUMNS, int MT, int NT, class WordOf>
__device__ inline void add_non_finite(Fragment<Accum, MT, NT>& c,
                                      const NonFinite<T, ROWS, COLUMNS>& table, int column0,
                                      WordOf word_of) {
    constexpr int WORDS = ROWS / 16;
    constexpr int TOGETHER = NT % 4 == 0 ? 4 : 2;  // atoms with loads in flight
    static_assert(NT % TOGETHER == 0);
    const int column = column0 + 2 * Lane().t;
#pragma unroll 1
    for (int w = 0; w < WORDS; ++w) {
        // Repeat each half twice, to match both halves of a word of the table.
        u32 kept[MT][2], dropped[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 x = word_of(m, half, w);
                kept[m][half] = __byte_perm(x, 0, 0x1010);
                if constexpr (HAS_DROPOUT) dropped[m][half] = __byte_perm(x, 0, 0x3232);
            }
#pragma unroll
        for (int n0 = 0; n0 < NT; n0 += TOGETHER) {
            u32 marks[TOGETHER][2], any = 0;
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    marks[n][e] = load_shared(table.at(column + 8 * (n0 + n) + e) + 4 * w);
                    any |= marks[n][e];
                }
            if (!__any_sync(~0u, any)) continue;
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n)
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const u32 mark = marks[n][e % 2];
                        u32 hit = mark & kept[m][e / 2];
                        if constexpr (HAS_DROPOUT)
                            hit |= (mark | __byte_perm(mark, 0, 0x1032)) & dropped[m][e / 2];
                        Accum& x = c.x[m][n0 + n][e];
                        if (hit & 0xffff) x += infinity<Accum>();
                        if (hit >> 16) x -= infinity<Accum>();
                    }
        }
    }
}
