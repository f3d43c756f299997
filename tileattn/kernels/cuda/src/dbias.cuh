// Layer 3. dbias of a broadcast bias: dS summed over the broadcast axes, in a fixed order. One tile of the
// bias at a time. If there are few tiles, several CTAs share one: each sums some of its score tiles into a
// copy of dbias, and backward_dbias_sum adds up the copies.
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

// A tile of the bias, and one of the CTAs that share it.
struct DbiasTile {
    const Params& p;
    const bool one_row, one_column;
    const int q_blocks, k_blocks;
    int share, r, c;
    i64 b, h;

    // Tiles are numbered one share after the other: CTAs that run at the same time load the same q and k.
    __device__ DbiasTile(const Params& p, i64 number)
        : p(p),
          one_row(p.bias_Nq == 1),
          one_column(p.bias_Nk == 1),
          q_blocks(int((p.Nq + BLOCK_Q - 1) / BLOCK_Q)),
          k_blocks(int((p.Nk + BLOCK_K - 1) / BLOCK_K)) {
        const int height = one_row ? 1 : q_blocks, width = one_column ? 1 : k_blocks;
        const int within = int(number % (i64(height) * width));
        i64 bh = number / (i64(height) * width);
        share = int(bh / (p.bias_B * p.bias_H)), bh %= p.bias_B * p.bias_H;
        // L2 swizzle: CTAs that run at the same time load few tiles of q and few of k.
        const int top = within / (SWIZZLE * width) * SWIZZLE,
                  rows_of_group = min(SWIZZLE, height - top);
        r = top + (within - top * width) % rows_of_group;
        c = (within - top * width) / rows_of_group;
        b = bh / p.bias_H, h = bh % p.bias_H;
    }

    __device__ Steps steps() const {
        return {p, Axis(p.bias_B == 1, b, p.B), Axis(p.bias_H == 1, h, p.Hq),
                Axis(one_row, r, q_blocks), Axis(one_column, c, k_blocks), share, int(p.dbias_copies)};
    }

    __device__ void write(Fragment<Accum, MT, NT>& sum, char* memory) const {
        if (p.dbias_copies > 1) {
            const i64 i = p.bias_Nk, h = p.bias_Nq * i, b = p.bias_H * h;
            write(static_cast<Accum*>(p.dbias_sums) + share * p.bias_B * b, {b, h, i, 1}, sum, memory);
        } else {
            write(static_cast<BiasElement*>(p.dbias), p.dbias_at, sum, memory);
        }
    }

    // Write to an array with these strides.
    template <class Value>
    __device__ void write(Value* dbias, const Pairs& at, Fragment<Accum, MT, NT>& sum,
                          char* memory) const {
        const int warp_m = threadIdx.x / WARP / WARPS_N, warp_n = threadIdx.x / WARP % WARPS_N;
        const int row0 = first_row(), column0 = first_column();
        const Lane lane;
        auto row = [&](int m, int e) { return row0 + 16 * m + lane.row(e); };
        dbias += b * at.b + h * at.h + r * BLOCK_Q * at.i + c * BLOCK_K * at.j;
        const int rows = one_row ? 1 : int(p.Nq) - r * BLOCK_Q;
        const int columns = one_column ? 1 : int(p.Nk) - c * BLOCK_K;
        auto write = [&](int i, int j, Accum x) {
            if (i < rows && j < columns)
                dbias[i * at.i + j * at.j] = narrow<Value>(x);
        };
        if (!one_row && !one_column) {
            struct alignas(2 * sizeof(Value)) Two {
                Value x, y;
            };
            // Rows of an even length, one after the other: dbias is contiguous, like the copies.
            constexpr bool EVEN =
                BIAS_ALIGNMENT_BYTES > 0 && BIAS_ALIGNMENT_BYTES % (2 * sizeof(BiasElement)) == 0;
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int e = 0; e < 4; e += 2)
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        const int i = row(m, e), j = column0 + 8 * n + lane.column(0);
                        const Accum x = sum.x[m][n][e], y = sum.x[m][n][e + 1];
                        if constexpr (EVEN) {
                            if (i < rows && j < columns)
                                *reinterpret_cast<Two*>(dbias + i * at.i + j) = {narrow<Value>(x),
                                                                                narrow<Value>(y)};
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

// The number of tiles of the bias, for each CTA that shares them.
__device__ inline i64 dbias_tiles(const Params& p) {
    const i64 rows = p.bias_Nq == 1 ? 1 : (p.Nq + BLOCK_Q - 1) / BLOCK_Q;
    const i64 columns = p.bias_Nk == 1 ? 1 : (p.Nk + BLOCK_K - 1) / BLOCK_K;
    return p.dbias_copies * p.bias_B * p.bias_H * rows * columns;
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
