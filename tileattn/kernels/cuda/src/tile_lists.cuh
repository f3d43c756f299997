// Layer 3. Lists of tiles, made on the device: as tile_lists.py makes them on the host. A warp takes
// a line of tiles, 32 at a time.
#pragma once

#include "mask.cuh"

// The line of this warp: of a batch entry and a head, where they differ. The last CTA may have warps
// without one.
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

    // How many come before that of this lane. All lanes call, in the order of their tiles.
    __device__ int before(bool is_listed) {
        const u32 listed = __ballot_sync(~0u, is_listed);
        const int own = count + __popc(listed & ((1u << threadIdx.x % WARP) - 1));
        count += __popc(listed);
        return own;
    }
};

__device__ inline int row_count(const Params& p) { return int((p.Nq + BLOCK_Q - 1) / BLOCK_Q); }
__device__ inline int column_count(const Params& p) { return int((p.Nk + BLOCK_K - 1) / BLOCK_K); }
