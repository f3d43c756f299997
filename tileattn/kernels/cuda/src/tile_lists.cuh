// Layer 3. Lists of the tiles that are not empty, made on the device, as tile_lists.py makes them on the
// host. A warp makes the list of one line (row or column of tiles), 32 tiles at a time.
#pragma once

#include "mask.cuh"

// The line of this warp. Batch entries and heads have their own lines only if their masks differ. The last
// CTA may have warps without a line.
struct TileLine {
    int b, h, line;
    bool is_there;

    __device__ TileLine(const Params& p, int heads, int lines) {
        const int n = int(blockIdx.x) * (THREADS / WARP) + int(threadIdx.x) / WARP;
        const int own_heads = p.tile_list_at.h ? heads : 1;
        const int bh = n / lines;
        line = n % lines, b = bh / own_heads, h = bh % own_heads;
        is_there = b < (p.tile_list_at.b ? int(p.B) : 1);
    }
};

// Counts the tiles of a line that are not empty.
struct TileCount {
    int count = 0;

    // Return the number of listed tiles before the tile of this lane. All lanes call, in the order of the
    // tiles.
    __device__ int before(bool is_listed) {
        const u32 listed = __ballot_sync(~0u, is_listed);
        const int own = count + __popc(listed & ((1u << threadIdx.x % WARP) - 1));
        count += __popc(listed);
        return own;
    }
};

__device__ inline int row_count(const Params& p) { return int((p.Nq + BLOCK_Q - 1) / BLOCK_Q); }
__device__ inline int column_count(const Params& p) { return int((p.Nk + BLOCK_K - 1) / BLOCK_K); }
