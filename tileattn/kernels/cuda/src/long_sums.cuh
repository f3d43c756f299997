// Layer 3. Sums of the forward pass of split float32 over many keys.
#pragma once

#include "softmax.cuh"

// Where the results of a warp go, from its first row on: 16 rows for each row tile.
struct RowResults {
    Element* out;
    Accum* lse;
    i64 stride;
    int rows, columns;
};

// Sums over many keys lose digits: each addition rounds the whole sum. So the sums over GROUP_TILES tiles go to a
// total, which is kept where the results will be. A thread reads only what it has stored.
constexpr int GROUP_TILES = 64;
template <int MT>
struct LongSums {
    Accum factor[MT][2];  // for the total: shifts have risen

    __device__ LongSums() {
#pragma unroll
        for (auto& row : factor) row[0] = row[1] = 1;
    }
    __device__ void scale(const Accum (&rescale)[MT][2]) {
#pragma unroll
        for (int m = 0; m < MT; ++m) factor[m][0] *= rescale[m][0], factor[m][1] *= rescale[m][1];
    }

    // Add the total to the sums. Unless they are the last, they become the total, and begin at zero.
    template <int VT>
    __device__ void add_total(const RowResults& results, RowState<MT>& state, Fragment<Accum, MT, VT>& acc,
                              bool has_total, bool is_last) {
        const Lane lane;
        auto [out, lse, stride, rows, columns] = results;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * m + lane.row(2 * half);
                Accum& l = state.l[m][half];
#pragma unroll
                for (int step = 1; step < 4; step *= 2) l += __shfl_xor_sync(~0u, l, step);
                if (has_total && row < rows) l = fma(lse[row], factor[m][half], l);
                __syncwarp();  // all lanes have read it
                if (!is_last && lane.t == 0 && row < rows) lse[row] = l;
                if (!is_last || lane.t > 0) l = 0;
#pragma unroll
                for (int n = 0; n < VT; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        const int column = 8 * n + lane.column(e);
                        const bool inside = row < rows && column < columns;
                        Accum& x = acc.x[m][n][e];
                        Element* const at = out + row * stride + column;
                        if (has_total && inside) x = fma(*at, factor[m][half], x);
                        if (!is_last && inside) *at = x;
                        if (!is_last) x = 0;
                    }
                factor[m][half] = 1;
            }
        __syncwarp();  // all lanes see the sums of a row
    }
};
