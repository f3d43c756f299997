// Layer 3. The caller's integer arrays (lengths, offsets, block tables), of 4 or 8 bytes an element.
#pragma once

#include "config.cuh"

// `bytes` of an element: 4, otherwise 8.
__device__ inline i64 integer_at(const void* data, i64 bytes, i64 n) {
    return bytes == 4 ? i64(static_cast<const int*>(data)[n]) : static_cast<const i64*>(data)[n];
}

struct Integers {
    const void* data;
    i64 bytes;

    __device__ i64 operator[](i64 n) const { return integer_at(data, bytes, n); }
};

// An integer array: bytes of an element, and strides in elements.
struct IntegerStrides {
    i64 bytes, i, j;

    __device__ i64 of(const void* data, i64 n, i64 m = 0) const {
        return integer_at(data, bytes, n * i + m * j);
    }
};
