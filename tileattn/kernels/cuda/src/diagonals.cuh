// Layer 3. Sums of dS along the diagonals of a tile, for arrays whose element depends only on the distance
// of query and key: then a diagonal adds one number to the gradient.
#pragma once

#include "ds_steps.cuh"

// All threads of a CTA call.
struct Diagonals {
    static constexpr int COLUMNS = NT < 4 ? 8 * NT : 32;  // of a piece of 16 rows
    static constexpr int PITCH = COLUMNS + 8;             // no bank conflicts, either way
    static constexpr int OF_PIECE = 16 + COLUMNS - 1, OF_WARP = 16 * MT + 8 * NT - 1;
    static constexpr int OF_TILE = BLOCK_Q + BLOCK_K - 1;
    static constexpr int WARPS = WARPS_M * WARPS_N;
    static constexpr int PIECES_AT = WARPS * OF_WARP;
    static constexpr int BYTES = (PIECES_AT + WARPS * 16 * PITCH) * int(sizeof(Accum));
    static_assert(8 * NT % COLUMNS == 0, "whole pieces");

    Accum* const memory;

    // Sum the diagonals of each warp's part of the tile. Diagonal n has row - column = n - (columns - 1). A
    // warp passes its part through shared memory in pieces.
    __device__ void sum(const Scores<false, MT, NT>& ds) const {
        const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        Accum *const own = memory + warp * OF_WARP, *const piece = memory + PIECES_AT + warp * 16 * PITCH;
        for (int n = lane; n < OF_WARP; n += WARP) own[n] = 0;
        const Lane at;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int first = 0; first < NT; first += COLUMNS / 8) {
                __syncwarp();  // the previous piece has been summed
#pragma unroll
                for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        piece[at.row(e) * PITCH + 8 * n + at.column(e)] = ds.x[m][first + n][e];
                __syncwarp();
                for (int n = lane; n < OF_PIECE; n += WARP) {
                    const int distance = n - (COLUMNS - 1);
                    Accum total = 0;
#pragma unroll
                    for (int row = 0; row < 16; ++row) {
                        const int column = row - distance;
                        if (column >= 0 && column < COLUMNS) total += piece[row * PITCH + column];
                    }
                    own[distance + 16 * m - 8 * first + 8 * NT - 1] += total;
                }
            }
        sync_threads();
    }

    // Call visit(sum, i, j) for each diagonal of the tile at query q0 and key k0; (i, j) is its first pair.
    template <class Visit>
    __device__ void for_each(int q0, int k0, Visit visit) const {
        for (int n = threadIdx.x; n < OF_TILE; n += THREADS) {
            const int distance = n - (BLOCK_K - 1);
            Accum total = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) {
                const int rows = warp / WARPS_N * MT * 16, columns = warp % WARPS_N * NT * 8;
                const int of_warp = distance - rows + columns + 8 * NT - 1;
                if (of_warp >= 0 && of_warp < OF_WARP) total += memory[warp * OF_WARP + of_warp];
            }
            visit(total, q0 + max(distance, 0), k0 + max(-distance, 0));
        }
    }
};
