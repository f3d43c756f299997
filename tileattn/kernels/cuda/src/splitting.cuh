// Layer 1. float32 as two float16 numbers, for products on tensor cores. splitting.py defines the functions.
#pragma once

#include "types.cuh"

constexpr float LOW_UNIT = 0x1p-11f;  // what 1 in a low part stands for

// x * factor = high + low * LOW_UNIT, with an error of at most 2**-23 of it, or 2**-36 if it is small.
struct Split {
    float16 high, low;
};

// The factor 2**e that moves the largest element into [2**14, 2**15), at most 2**126. The element is finite
// and at least 0.
__device__ inline float power_of_two(float largest) {
    const u32 field = __float_as_uint(largest) >> 23;
    return __uint_as_float(min(268u - field, 253u) << 23);
}

// Exact: the exponent field of the inverse is 254 less that of the factor.
__device__ inline float inverse_power(float factor) {
    return __uint_as_float((254u << 23) - __float_as_uint(factor));
}

// A contracted fma would give the low part of a tiny negative number another sign of zero.
__device__ inline Split split(float x, float factor) {
    const float y = rounded_product(x, factor);
    const float16 high = narrow<float16>(y);
    return {high, narrow<float16>((y - widen(high)) / LOW_UNIT)};
}

// Rows have one factor for each tile of this many.
constexpr int TILE_ROWS = 64;

// In a row of planes, 64 high parts and the 64 low parts of the same columns take turns: a slice of a
// SmemTile each.
__device__ constexpr int plane_columns(int columns) { return (columns + 63) / 64 * 128; }
__device__ constexpr int high_column(int column) { return column / 64 * 128 + column % 64; }
__device__ constexpr int low_column(int column) { return high_column(column) + 64; }
