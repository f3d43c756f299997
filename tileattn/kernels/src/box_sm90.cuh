// Layer 2. Tiles as Hopper's copies of boxes write them and as its products read them.
#pragma once

#include "tma_sm90.cuh"
#include "wgmma_sm90.cuh"

// ROWS x COLUMNS elements of 16 bits, in slices of 64 columns. A row of a slice has 128 bytes,
// whose 16-byte chunks the copies exchange by the row's number modulo 8, as a Tile of this pitch
// does.
template <int ROWS, int COLUMNS>
struct BoxTile {
    static constexpr int WIDTH = 64, PITCH = 128, GROUP = 8 * PITCH;  // of eight rows
    static constexpr int SLICES = (COLUMNS + WIDTH - 1) / WIDTH, SLICE = ROWS * PITCH;
    static constexpr int BYTES = SLICES * SLICE;
    static_assert(SLICE % GROUP == 0, "rows come in groups of eight");

    u32 address;  // a multiple of 1024

    // Begin to fill the tile from row `row` on; what is beyond the array becomes zero.
    __device__ void load(const TensorMap& map, int row, int head, int batch,
                         const Barrier& done) const {
        done.expect(BYTES);
#pragma unroll
        for (int n = 0; n < SLICES; ++n)
            load_box(address + n * SLICE, map, n * WIDTH, row, head, batch, done);
    }

    // Let the cache have what `load` will copy.
    __device__ static void prefetch(const TensorMap& map, int row, int head, int batch) {
#pragma unroll
        for (int n = 0; n < SLICES; ++n) prefetch_box(map, n * WIDTH, row, head, batch);
    }

    // The address of 16 bytes of a row.
    __device__ u32 chunk(int row, int byte) const {
        return address + byte / PITCH * SLICE + row * PITCH + (byte % PITCH ^ row % 8 * 16);
    }

    // Operands of products. The descriptor holds, in units of 16 bytes, the address, the distance
    // of slices and that of groups of eight rows; and which exchange of chunks.

    // A[m, k] or B[k, n] whose m or n are rows of the tile, the first of them `row`.
    __device__ Operand<false> by_rows(int row, int k) const {
        return {describe(row * PITCH, k / WIDTH * SLICE + k % WIDTH * 2)};
    }
    // B[k, n]: rows of the tile are k; n = 0 is the column `column`. Unless a slice begins with it,
    // the n do not go beyond its slice.
    __device__ Operand<true> by_columns(int k, int column = 0) const {
        return {describe(column / WIDTH * SLICE + column % WIDTH * 2, k * PITCH)};
    }

    // Of the place, only what is known when it is compiled is added last: all operands of a product
    // share the rest.
    __device__ u64 describe(int place, int known) const {
        constexpr u64 CONSTANT = u64(SLICE >> 4) << 16 | u64(GROUP >> 4) << 32 | u64(1) << 62;
        return (CONSTANT | (address + place) >> 4) + (known >> 4);
    }
};
