// Layer 3. The planes of float32 arrays: float16 numbers as split_rows.cuh writes them, and the inverse factors of
// their tiles.
#pragma once

#include "sequence.cuh"
#include "splitting.cuh"

// Columns of a tile in shared memory: of planes if float32 is split.
__device__ constexpr int tile_columns(int columns) { return SPLIT_FLOATS ? plane_columns(columns) : columns; }

// The largest product of an element of q and one of k, in units of log 2 of the score. An element loses digits
// below 2**-50 of the largest of its tile: with more, that would show in a score.
constexpr float MAX_PRODUCT = 0x1p20f;

// The larger of two numbers, or NaN if one is NaN.
__device__ inline float maximum_or_nan(float x, float y) {
    float largest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(x), "f"(y));
    return largest;
}

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
