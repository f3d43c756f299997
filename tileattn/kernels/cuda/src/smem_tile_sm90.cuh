// Layer 2. Shared-memory tiles as TMA writes them and as wgmma reads them.
#pragma once

#include "cluster.cuh"
#include "tma_sm90.cuh"
#include "wgmma_sm90.cuh"

// Unroll factor of a producer's loop over the slices of a tile. A producer has no registers for all four
// loads of a wide head at once.
constexpr int LOAD_UNROLL = 2;

// ROWS x COLUMNS elements of 16 bits with the 128-byte swizzle, in slices of 64 columns. A row of a slice
// takes 128 bytes, and its 16-byte chunks are permuted by the row modulo 8. A Tile of this pitch has the
// same swizzle.
template <int ROWS, int COLUMNS>
struct SmemTile {
    static constexpr int WIDTH = 64, PITCH = 128,
                         ATOM = 8 * PITCH;  // a swizzle atom has eight rows
    static constexpr int SLICES = (COLUMNS + WIDTH - 1) / WIDTH, SLICE = ROWS * PITCH;
    static constexpr int BYTES = SLICES * SLICE;
    static_assert(SLICE % ATOM == 0, "whole swizzle atoms");

    struct alignas(1024) Storage {
        char bytes[BYTES];
    };

    u32 address;  // of a Storage

    // Start TMA loads of the whole tile from row `row` and column `column` on. Elements outside the tensor
    // become zero. The loop over slices has UNROLL copies of a load. ONCE: see tma_load.
    template <int UNROLL = SLICES, bool ONCE = false>
    __device__ void load(const TensorMap& map, int row, int head, int batch, const Barrier& full,
                         int column = 0) const {
        full.arrive_and_expect_tx(BYTES);
        load_box<UNROLL, ONCE>(map, 0, row, head, batch, full, column);
    }

    // The same, in two boxes of half of the rows, swapped if `swap` is 1.
    template <int UNROLL = SLICES>
    __device__ void load_halves(const TensorMap& map, int row, int head, int batch,
                                const Barrier& full, int column, int swap) const {
        constexpr int HALF = ROWS / 2;
        full.arrive_and_expect_tx(BYTES);
#pragma unroll 1
        for (int at = 0; at < ROWS; at += HALF)
            load_box<UNROLL>(map, at, row + (at ^ swap * HALF), head, batch, full, column);
    }

    // Start TMA loads of one box of the map, to the rows from `at` on.
    template <int UNROLL = SLICES, bool ONCE = false>
    __device__ void load_box(const TensorMap& map, int at, int row, int head, int batch,
                             const Barrier& full, int column = 0) const {
#pragma unroll UNROLL
        for (int n = 0; n < SLICES; ++n)
            tma_load<ONCE>(address + n * SLICE + at * PITCH, map, column + n * WIDTH, row, head, batch, full);
    }

    // Prefetch the data of `load` to the L2 cache.
    __device__ static void prefetch(const TensorMap& map, int row, int head, int batch,
                                    int column = 0) {
#pragma unroll
        for (int n = 0; n < SLICES; ++n) tma_prefetch(map, column + n * WIDTH, row, head, batch);
    }

    // The address of a 16-byte chunk of a row.
    __device__ u32 chunk(int row, int byte) const {
        return address + byte / PITCH * SLICE + row * PITCH + (byte % PITCH ^ row % 8 * 16);
    }

    // Matrix descriptors hold, in units of 16 bytes, the address, the offset between slices and the
    // offset between swizzle atoms, and the swizzle mode.

    // K-major A[m, k] or B[k, n]: m or n are rows of the tile, from `row` on.
    __device__ Descriptor<false> k_major(int row, int k) const {
        return {describe(row * PITCH, k / WIDTH * SLICE + k % WIDTH * 2)};
    }
    // MN-major B[k, n]: k are rows of the tile, and n = 0 is column `column`. Unless that is the first of a
    // slice, all n must be in the same slice.
    __device__ Descriptor<true> mn_major(int k, int column = 0) const {
        return {describe(column_offset(column), k * PITCH)};
    }
    // The same, with n = 64 at column `second`, for which the same holds.
    __device__ Descriptor<true> mn_major(int k, int column, int second) const {
        const int offset = column_offset(column);
        return {describe(offset, k * PITCH, column_offset(second) - offset)};
    }

    // The offset known at compile time is added last: all descriptors of a GEMM share the rest. With more
    // than two slices it is added only to the lower half: otherwise ptxas keeps descriptors in vector
    // registers.
    __device__ u64 describe(int offset, int known, int between_slices = SLICE) const {
        constexpr u64 CONSTANT = u64(ATOM >> 4) << 32 | u64(1) << 62;
        const u32 low = u32(between_slices >> 4) << 16 | address_in_cta(address + offset) >> 4;
        if constexpr (SLICES <= 2) return (CONSTANT | low) + (known >> 4);
        u64 descriptor;
        asm("mov.b64 %0, {%1, %2};"
            : "=l"(descriptor)
            : "r"(low + (known >> 4)), "r"(u32(CONSTANT >> 32)));
        return descriptor;
    }

    __device__ static int column_offset(int column) {
        return column / WIDTH * SLICE + column % WIDTH * 2;
    }
};
