// Layer 3. The dense mask of a tile of scores: bits in the registers of the lanes that hold the scores.
#pragma once

#include "mask.cuh"

// Transpose the 4 x 4 bytes of four lanes, whose numbers differ by STEP: byte s of lane `at` becomes byte
// `at` of lane s.
template <int STEP>
__device__ inline u32 transpose_bytes(u32 x, int at) {
    x = __byte_perm(x, __shfl_xor_sync(~0u, x, STEP), at & 1 ? 0x3715 : 0x6240);
    return __byte_perm(x, __shfl_xor_sync(~0u, x, 2 * STEP), at & 2 ? 0x3276 : 0x5410);
}

// A vector holds the mask bytes of sixteen consecutive keys of one query. The lanes that hold a row of the
// scores (TRANSPOSED: a column) share its loads, then exchange bits by shuffles: few, wide loads.
template <bool TRANSPOSED, int MT, int NT>
struct DenseMask {
    static constexpr int SHARERS = TRANSPOSED ? 8 : 4;
    static constexpr int VECTORS = TRANSPOSED ? 2 * NT * MT : 2 * MT * (NT / 2);  // of all SHARERS
    static constexpr int LOADS = (VECTORS + SHARERS - 1) / SHARERS;
    struct alignas(16) Vector {
        u32 words[4];
    };
    Vector vectors[LOADS];
    u32 bits[(LOADS + 3) / 4][2];  // four loads at a time

    // Start to load the mask of a warp's scores from (row, column) on.
    __device__ void load(const AttentionMask& attn_mask, int row, int column) {
        const Lane lane;
#pragma unroll
        for (int k = 0; k < LOADS; ++k) {
            const int n = SHARERS * k + (TRANSPOSED ? lane.g : lane.t);
            const int i = TRANSPOSED ? column + n / (2 * MT) * 8 + lane.column(n / MT)
                                     : row + n / (NT / 2) * 8 + lane.g;
            const int j = TRANSPOSED ? row + n % MT * 16 : column + n % (NT / 2) * 16;
            // Past the end of the mask any value will do.
            const char* const from = reinterpret_cast<const char*>(attn_mask.mask) +
                                     min(i, attn_mask.Nq - 1) * attn_mask.mask_i;
            vectors[k] = load_vector(from, attn_mask.mask_j, j, attn_mask.Nk);
        }
    }

    // Load keys j to j + 15 of a row. No load of MASK_VECTOR_WIDTH keys crosses the end of the row.
    __device__ static Vector load_vector(const char* from, i64 step, int j, int Nk) {
        if constexpr (MASK_VECTOR_WIDTH == 16) {
            return *reinterpret_cast<const Vector*>(from + min(j, Nk - 16));
        } else {
            Vector vector = {};
#pragma unroll
            for (int b = 0; b < 16; b += MASK_VECTOR_WIDTH) {
                u32 some;
                if constexpr (MASK_VECTOR_WIDTH == 2)
                    some = *reinterpret_cast<const unsigned short*>(from + min(j + b, Nk - 2));
                else
                    some = static_cast<unsigned char>(from[min(j + b, Nk - 1) * step]);
                vector.words[b / 4] |= some << b % 4 * 8;
            }
            return vector;
        }
    }

    // Shuffle the bits to the lanes that hold the scores. All lanes call.
    __device__ void share() {
        const Lane lane;
        make_ones();
#pragma unroll
        for (int k = 0; k < LOADS; k += 4) {
            // `low` gets the bytes of the first four of eight keys, `high` of the last four: two bits
            // of each load.
            u32 low = 0, high = 0;
#pragma unroll
            for (int i = 0; i < 4 && k + i < LOADS; ++i) {
                const u32(&words)[4] = vectors[k + i].words;
                low += (words[0] + words[2] * 2) * (1 << 2 * i);
                high += (words[1] + words[3] * 2) * (1 << 2 * i);
            }
            u32(&to)[2] = bits[k / 4];
            if constexpr (TRANSPOSED) {
                const bool upper = lane.g & 4;
                const u32 other = __shfl_xor_sync(~0u, upper ? low : high, 16);
                to[0] = transpose_bytes<4>(upper ? other : low, lane.g);
                to[1] = transpose_bytes<4>(upper ? high : other, lane.g);
            } else {
                to[0] = transpose_bytes<1>(__byte_perm(low, high, 0x6420), lane.t);
                to[1] = transpose_bytes<1>(__byte_perm(low, high, 0x7531), lane.t);
            }
        }
    }

    // Any byte other than 0 means true. Make it 1, which it nearly always is already.
    __device__ void make_ones() {
        u32 all = 0;
#pragma unroll
        for (const Vector& vector : vectors)
#pragma unroll
            for (u32 word : vector.words) all |= word;
        if (!(all & 0xfefefefe)) return;
#pragma unroll
        for (Vector& vector : vectors)
#pragma unroll
            for (u32& word : vector.words)
                word = (((word & 0x7f7f7f7f) + 0x7f7f7f7f) | word) >> 7 & 0x01010101;
    }

    // Call visit(m, half, n, e, visible) for every score of this lane, in the order of the bits, which is
    // the cheapest to test.
    template <class Visit>
    __device__ void for_each(Visit visit) const {
#pragma unroll
        for (int k = 0; k < LOADS; k += 4)
#pragma unroll
            for (int w = 0; w < 2; ++w)
#pragma unroll
                for (int b = 0; b < 32; ++b) {
                    const bool visible = bits[k / 4][w] & 1u << b;
                    const int from = TRANSPOSED ? 4 * w + b / 8 : b / 8;
                    const int x = SHARERS * (k + b % 8 / 2) + from;
                    if (x >= VECTORS) continue;
                    if constexpr (TRANSPOSED)
                        visit(x % MT, b % 2, x / (2 * MT), x / MT % 2, visible);
                    else
                        visit(x / NT, x / (NT / 2) % 2, x % (NT / 2) * 2 + b % 2, w, visible);
                }
    }
};
