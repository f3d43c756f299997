// Layer 3. The planes of float32 keys and values: float16 numbers as split_rows.cu writes them, and the inverse
// factors of their tiles.
#pragma once

#include "sequence.cuh"
#include "splitting.cuh"

// The inverse factors of the tiles of a key head, from the first tile of a sequence on. Packed sequence b begins
// at tile k_start / TILE_ROWS + b. NaN marks a tile that cannot be split.
__device__ inline i64 first_factor(const Params& p, i64 entry, i64 k_start, i64 b, i64 kv) {
    const i64 first = PACKED ? k_start / TILE_ROWS + b : 0;
    return (entry * p.Hkv + kv) * block_count<TILE_ROWS>(p, p.Nk) + first;
}
