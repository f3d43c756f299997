// Layer 3. The planes of float32 arrays: float16 numbers as split_rows.cuh writes them, and the inverse factors of
// their tiles.
#pragma once

#include "sequence.cuh"
#include "split_operand.cuh"

// Columns of a tile in shared memory: of planes if float32 is split.
__device__ constexpr int tile_columns(int columns) { return SPLIT_FLOATS ? plane_columns(columns) : columns; }

// The largest product of an element of q and one of k, in units of log 2 of the score. An element loses digits
// below 2**-50 of the largest of its tile: with more, that would show in a score.
constexpr float MAX_PRODUCT = 0x1p20f;

// True if the scores of tiles of queries and of keys keep their digits. The inverse factors are the largest, and NaN
// if a tile cannot be split: a score_mod may return numbers for scores of NaN.
__device__ inline bool keeps_digits(const Params& p, float q_inverse, float k_inverse) {
    const float scale = fabsf(float(p.scale)) * 1.44269504f;
    return q_inverse * 0x1p15f * (k_inverse * 0x1p15f) * scale <= MAX_PRODUCT;
}

// The index of the inverse factor of the first tile of a sequence, among all heads. `heads` and `rows` are the
// array's. Packed sequence b begins at tile start / TILE_ROWS + b. NaN marks a tile that cannot be split.
__device__ inline i64 first_factor(const Params& p, i64 heads, i64 rows, i64 entry, i64 h, i64 start, i64 b) {
    const i64 first = PACKED ? start / TILE_ROWS + b : 0;
    return (entry * heads + h) * block_count<TILE_ROWS>(p, rows) + first;
}

// The planes of two arrays of a head, k and v or q and dO: the index of their first row, and of the inverse factor of
// their first tile.
struct HeadPlanes {
    u32 first_row, factor;  // more than 2**32 rows do not fit in memory

    // `heads` and `rows` are the arrays'. The sequence begins at row `start`.
    __device__ HeadPlanes(const Params& p, const Sequence& sequence, i64 heads, i64 h, i64 rows, i64 start)
        : first_row(u32((sequence.entry() * heads + h) * rows + start)),
          factor(u32(first_factor(p, heads, rows, sequence.entry(), h, start, sequence.b))) {}

    __device__ static HeadPlanes of_keys(const Params& p, const Sequence& sequence, i64 h) {
        return {p, sequence, p.Hkv, h, p.Nk, sequence.k_start};
    }
    __device__ static HeadPlanes of_queries(const Params& p, const Sequence& sequence, i64 h) {
        return {p, sequence, p.Hq, h, p.Nq, sequence.q_start};
    }

    // Start to copy planes from `row` on to a tile. Rows from `end` on become zero.
    template <int BLOCK, int PITCH>
    __device__ void load(const Tile<float16, BLOCK, PITCH>& tile, const void* planes, int row, int end,
                         u32 thread = threadIdx.x) const {
        tile.template load<THREADS, 16>(static_cast<const float16*>(planes) + i64(first_row + row) * PITCH, PITCH,
                                        end - row, PITCH, thread);
    }
    __device__ float inverse(const float* factors, int row) const { return factors[factor + row / TILE_ROWS]; }
};

// Load two neighbouring elements of a row of float32. Rows aligned to 8 bytes or more have an even number of columns
// (row_alignment in families/float32.py). Without a branch all loads of a row start at once.
__device__ inline float2 load_pair(const float* row, int column, int columns) {
    float2 x{0, 0};
    if constexpr (ALIGNMENT_BYTES >= 8) {
        if (column < columns) x = *reinterpret_cast<const float2*>(row + column);
    } else {
        if (column < columns) x.x = row[column];
        if (column + 1 < columns) x.y = row[column + 1];
    }
    return x;
}
