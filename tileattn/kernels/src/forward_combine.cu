// Join the sums that forward_split left of the pieces of each row: a CTA for each row. Each warp
// takes every WARPS_M-th piece, by its index, so that the order of the sums depends on nothing else.
#include "pieces.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    forward_combine(const __grid_constant__ Params p) {
    constexpr int COLUMNS = VALUE_DIM / WARP;  // of a lane
    __shared__ Accum sums[WARPS_M][VALUE_DIM], totals[WARPS_M];
    const int rows = int(p.group * p.Nq), r = int(blockIdx.x) % rows;
    const int kv = int(blockIdx.x) / rows % int(p.Hkv), b = int(blockIdx.x) / rows / int(p.Hkv);
    const SharedRow row(p, kv, r);
    const Sequence sequence(p, b);
    const Range keys = SlidingWindow(p, sequence).key_range(row.i, row.i + 1);
    const int begin = keys.lo / int(p.piece), end = (keys.hi + int(p.piece) - 1) / int(p.piece);
    const i64 first = partial_index(p, b, kv, r, 0);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const Accum softmax_scale_log2 = ScoreMod(p, b, row.h).softmax_scale_log2();
    auto sum_of = [&](int piece) {
        return RowSum::load(static_cast<const Accum*>(p.partial_sums) + 2 * (first + piece));
    };

    RowSum total;
    for (int piece = begin + lane; piece < end; piece += WARP)
        total.raise(sum_of(piece), softmax_scale_log2);
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        RowSum other;
        other.m = __shfl_xor_sync(~0u, total.m, step), other.l = __shfl_xor_sync(~0u, total.l, step);
        other.large = __shfl_xor_sync(~0u, int(total.large), step);
        // Both lanes are to keep the same one, where shifts are equal, too.
        if (lane & step) {
            const RowSum mine = total;
            total = other, other = mine;
        }
        total.raise(other, softmax_scale_log2);
    }

    Accum acc[COLUMNS] = {}, l = 0;
#pragma unroll 4
    for (int piece = begin + (warp + WARPS_M - begin % WARPS_M) % WARPS_M; piece < end;
         piece += WARPS_M) {
        const RowSum own = sum_of(piece);
        const Accum factor = own.factor(total, softmax_scale_log2);
        const Accum* const from =
            static_cast<const Accum*>(p.partial_out) + (first + piece) * VALUE_DIM;
        l = fma(own.l, factor, l);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) acc[n] = fma(from[n * WARP + lane], factor, acc[n]);
    }
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) sums[warp][n * WARP + lane] = acc[n];
    if (lane == 0) totals[warp] = l;
    __syncthreads();
    total.l = 0;
    for (int n = 0; n < WARPS_M; ++n) total.l += totals[n];
    const Accum inverse =
        total.finish(p, lse_index(p, sequence, row), row.h, threadIdx.x == 0);
    Element* const out = out_row(p, sequence, row);
    for (int d = threadIdx.x; d < p.Dv; d += THREADS) {
        Accum all = 0;
        for (int n = 0; n < WARPS_M; ++n) all += sums[n][d];
        out[d] = narrow<Element>(all * inverse);
    }
}
