// Layer 3. dbias of a broadcast bias: dS summed over the broadcast axes, in a fixed order. One tile of the
// bias at a time.
#pragma once

#include "ds_steps.cuh"

constexpr int SWIZZLE = 8;  // L2 swizzle: rows of tiles that consecutive CTAs share

// Sum each row into the first column.
__device__ inline void reduce_columns(Fragment<Accum, MT, NT>& sum) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Accum total = 0;
#pragma unroll
            for (int n = 0; n < NT; ++n) total += sum.x[m][n][2 * half] + sum.x[m][n][2 * half + 1];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            sum.x[m][0][2 * half] = total;
        }
}

// Sum each column into the first row.
__device__ inline void reduce_rows(Fragment<Accum, MT, NT>& sum) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            Accum total = 0;
#pragma unroll
            for (int m = 0; m < MT; ++m) total += sum.x[m][n][e] + sum.x[m][n][e + 2];
#pragma unroll
            for (int step = 4; step < WARP; step *= 2) total += __shfl_xor_sync(~0u, total, step);
            sum.x[0][n][e] = total;
        }
}


// Bytes of shared memory in which warps exchange sums.
constexpr int SHARES_BYTES =
    (BLOCK_Q * WARPS_N > BLOCK_K * WARPS_M ? BLOCK_Q * WARPS_N : BLOCK_K * WARPS_M) *
    int(sizeof(Accum));

// A tile of the bias.
struct DbiasTile {
    const Params& p;
    const bool one_row, one_column;
    const int q_blocks, k_blocks;
    int r, c;
    i64 b, h;

    __device__ DbiasTile(const Params& p, i64 number)
        : p(p),
          one_row(p.bias_Nq == 1),
          one_column(p.bias_Nk == 1),
          q_blocks(int((p.Nq + BLOCK_Q - 1) / BLOCK_Q)),
          k_blocks(int((p.Nk + BLOCK_K - 1) / BLOCK_K)) {
        const int height = one_row ? 1 : q_blocks, width = one_column ? 1 : k_blocks;
        const int within = int(number % (i64(height) * width));
        const i64 bh = number / (i64(height) * width);
        // L2 swizzle: CTAs that run at the same time load few tiles of q and few of k.
        const int top = within / (SWIZZLE * width) * SWIZZLE,
                  rows_of_group = min(SWIZZLE, height - top);
        r = top + (within - top * width) % rows_of_group;
        c = (within - top * width) / rows_of_group;
        b = bh / p.bias_H, h = bh % p.bias_H;
    }

    __device__ Steps steps() const {
        return {p, Axis(p.bias_B == 1, b, p.B), Axis(p.bias_H == 1, h, p.Hq),
                Axis(one_row, r, q_blocks), Axis(one_column, c, k_blocks)};
    }

    __device__ void write(Fragment<Accum, MT, NT>& sum, char* memory) const {
        const int warp_m = threadIdx.x / WARP / WARPS_N, warp_n = threadIdx.x / WARP % WARPS_N;
        const int row0 = first_row(), column0 = first_column();
        const Lane lane;
        auto row = [&](int m, int e) { return row0 + 16 * m + lane.row(e); };
        BiasElement* const dbias = static_cast<BiasElement*>(p.dbias) + b * p.dbias_at.b +
                                   h * p.dbias_at.h + r * BLOCK_Q * p.dbias_at.i +
                                   c * BLOCK_K * p.dbias_at.j;
        const int rows = one_row ? 1 : int(p.Nq) - r * BLOCK_Q;
        const int columns = one_column ? 1 : int(p.Nk) - c * BLOCK_K;
        auto write = [&](int i, int j, Accum x) {
            if (i < rows && j < columns)
                dbias[i * p.dbias_at.i + j * p.dbias_at.j] = narrow<BiasElement>(x);
        };
        if (!one_row && !one_column) {
            struct alignas(2 * sizeof(BiasElement)) Two {
                BiasElement x, y;
            };
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int e = 0; e < 4; e += 2)
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        const int i = row(m, e), j = column0 + 8 * n + lane.column(0);
                        const Accum x = sum.x[m][n][e], y = sum.x[m][n][e + 1];
                        if constexpr (BIAS_ALIGNMENT_BYTES % sizeof(Two) == 0 &&
                                      BIAS_ALIGNMENT_BYTES > 0) {
                            // dbias is contiguous and has the shape of the bias, so its rows are aligned,
                            // too.
                            if (i < rows && j < columns)
                                *reinterpret_cast<Two*>(dbias + i * p.dbias_at.i + j) = {
                                    narrow<BiasElement>(x), narrow<BiasElement>(y)};
                        } else {
                            write(i, j, x);
                            write(i, j + 1, y);
                        }
                    }
            return;
        }

        // Along an axis of length 1 every warp has a partial sum. Add them up in the order of the warps.
        Accum* const shares = reinterpret_cast<Accum*>(memory);
        const int pitch = one_column ? WARPS_N : BLOCK_K;
        if (one_column) reduce_columns(sum);
        if (one_row) reduce_rows(sum);
        sync_threads();  // all warps are done with the previous contents
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const bool first_row = m == 0 && lane.row(e) == 0;
                    const bool first_column = n == 0 && lane.column(e) == 0;
                    if ((first_row || !one_row) && (first_column || !one_column))
                        shares[(one_row ? warp_m : row(m, e)) * pitch +
                               (one_column ? warp_n : column0 + 8 * n + lane.column(e))] =
                            sum.x[m][n][e];
                }
        sync_threads();
        for (int x = threadIdx.x; x < (one_row ? 1 : BLOCK_Q) * (one_column ? 1 : BLOCK_K);
             x += THREADS) {
            const int i = one_row ? 0 : x, j = one_row ? x : 0;
            Accum total = 0;
            for (int m = i; m < (one_row ? WARPS_M : i + 1); ++m)
                for (int n = j; n < (one_column ? WARPS_N : j + 1); ++n) total += shares[m * pitch + n];
            write(i, j, total);
        }
    }
};

// The number of tiles of the bias.
__device__ inline i64 dbias_tiles(const Params& p) {
    const i64 rows = p.bias_Nq == 1 ? 1 : (p.Nq + BLOCK_Q - 1) / BLOCK_Q;
    const i64 columns = p.bias_Nk == 1 ? 1 : (p.Nk + BLOCK_K - 1) / BLOCK_K;
    return p.bias_B * p.bias_H * rows * columns;
}

// Sum and write one tile of dbias. for_each(steps, add) calls add(ds, b, h) for the dS of each step. All
// consumer threads call, when no thread reads `memory` any more.
template <class ForEach>
__device__ __forceinline__ void sum_dbias(const DbiasTile& tile, char* memory, ForEach for_each) {
    Fragment<Accum, MT, NT> sum;
    sum.clear();
    for_each(tile.steps(), [&](Scores<false, MT, NT>& ds, int, int) {
        ds.for_each([&](Accum x, int, int, int m, int n, int e) { sum.x[m][n][e] += x; });
    });
    tile.write(sum, memory);
}
