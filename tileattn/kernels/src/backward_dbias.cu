// dbias: one CTA for each tile of the bias sums dS over all that the bias is broadcast over, in a
// fixed order.
#include "ds_tiles.cuh"

constexpr int SWIZZLE = 8;  // L2 swizzle: rows of tiles that neighbouring CTAs go down together

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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_dbias(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char memory[];
    const int Nq = int(p.Nq);
    const bool one_row = p.bias_Nq == 1, one_column = p.bias_Nk == 1;
    const int q_blocks = (Nq + BLOCK_Q - 1) / BLOCK_Q;
    const int k_blocks = int((p.Nk + BLOCK_K - 1) / BLOCK_K);
    const int height = one_row ? 1 : q_blocks, width = one_column ? 1 : k_blocks;
    const int within = int(blockIdx.x % (i64(height) * width));
    const i64 bh = blockIdx.x / (i64(height) * width);
    // CTAs that run at a time load few tiles of q and few of k.
    const int top = within / (SWIZZLE * width) * SWIZZLE,
              rows_of_group = min(SWIZZLE, height - top);
    const int r = top + (within - top * width) % rows_of_group;
    const int c = (within - top * width) / rows_of_group;
    const i64 own_b = bh / p.bias_H, own_h = bh % p.bias_H;
    const int warp_m = threadIdx.x / WARP / WARPS_N, warp_n = threadIdx.x / WARP % WARPS_N;
    const int row0 = first_row(), column0 = first_column();
    const Lane lane;

    const Steps step(p, Axis(p.bias_B == 1, own_b, p.B), Axis(p.bias_H == 1, own_h, p.Hq),
               Axis(one_row, r, q_blocks), Axis(one_column, c, k_blocks));
    auto row = [&](int m, int e) { return row0 + 16 * m + lane.row(e); };

    Fragment<Accum, MT, NT> sum;
    sum.clear();
    for_each_ds(p, step, memory, [&](Scores<false, MT, NT>& ds, int, int) {
        ds.for_each([&](Accum x, int, int, int m, int n, int e) { sum.x[m][n][e] += x; });
    });

    BiasElement* const dbias = static_cast<BiasElement*>(p.dbias) + own_b * p.dbias_at.b +
                               own_h * p.dbias_at.h + r * BLOCK_Q * p.dbias_at.i +
                               c * BLOCK_K * p.dbias_at.j;
    const int rows = one_row ? 1 : Nq - r * BLOCK_Q;
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
                        // dbias is contiguous, of the bias's shape: what held for that holds here.
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

    // Along an axis of length 1 every warp has a share, summed in the order of the warps.
    Accum* const shares = reinterpret_cast<Accum*>(memory);
    const int pitch = one_column ? WARPS_N : BLOCK_K;
    if (one_column) reduce_columns(sum);
    if (one_row) reduce_rows(sum);
    __syncthreads();  // all warps are done with v
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
    __syncthreads();
    for (int x = threadIdx.x; x < (one_row ? 1 : BLOCK_Q) * (one_column ? 1 : BLOCK_K);
         x += THREADS) {
        const int i = one_row ? 0 : x, j = one_row ? x : 0;
        Accum total = 0;
        for (int m = i; m < (one_row ? WARPS_M : i + 1); ++m)
            for (int n = j; n < (one_column ? WARPS_N : j + 1); ++n) total += shares[m * pitch + n];
        write(i, j, total);
    }
}
