// Layer 3. The caller's lengths, offsets and pages: integers of 4 or 8 bytes, read as they are.
#pragma once

#include "config.cuh"

// bytes: of an element; other numbers than 4 mean 8.
__device__ inline i64 integer_at(const void* data, i64 bytes, i64 n) {
    return bytes == 4 ? i64(static_cast<const int*>(data)[n]) : static_cast<const i64*>(data)[n];
}

struct Integers {
    const void* data;
    i64 bytes;

    __device__ i64 operator[](i64 n) const { return integer_at(data, bytes, n); }
};
