// Layer 1. float32 as two float16 numbers, a high and a low one: x = (high + low * 2**-11) / factor. As
// splitting.py, with the same bits.
#pragma once

#include "types.cuh"

constexpr float LOW_UNIT = 0x1p-11f;  // of a low part

// The power of two that brings the largest number of a group to [2**14, 2**15), or at most 2**126.
__device__ inline float power_of_two(float largest) {
    const int field = 268 - int(__float_as_uint(largest) >> 23);
    return __uint_as_float(u32(field < 253 ? field : 253) << 23);
}
__device__ inline float inverse_power(float factor) {
    return __uint_as_float((254u << 23) - __float_as_uint(factor));
}

struct Split {
    float16 high, low;
};
__device__ inline Split split(float x, float factor) {
    const float scaled = x * factor;
    const float16 high = narrow<float16>(scaled);
    return {high, narrow<float16>((scaled - widen(high)) / LOW_UNIT)};
}

// Rows of keys and values have one factor for each tile of this many.
constexpr int TILE_ROWS = 64;

// In a row of planes, 64 high parts and the 64 low parts of the same columns take turns: a slice of a
// SmemTile each.
__device__ constexpr int plane_columns(int columns) { return (columns + 63) / 64 * 128; }
__device__ constexpr int high_column(int column) { return column / 64 * 128 + column % 64; }
__device__ constexpr int low_column(int column) { return high_column(column) + 64; }
