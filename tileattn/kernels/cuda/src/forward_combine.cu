// Combine the sums of forward_split over the splits of each row. Share s adds up splits s, s + 8, s + 16
// and so on, so the order of the sums depends only on the indices of the splits. A row has WARPS_N warps:
// one for all shares, or one for each share.
#include "partial_sums.cuh"

constexpr int SHARES = 8, OWN = SHARES / WARPS_N;  // OWN: shares of a warp
static_assert(WARPS_N == 1 || (WARPS_N == SHARES && WARPS_M == 1), "__syncthreads joins the warps of a row");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    forward_combine(const __grid_constant__ Params p) {
    overlap_launches();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, share = warp % WARPS_N;
    const SplitRow row(p, int(blockIdx.x) * WARPS_M + warp / WARPS_N);
    if (!row.is_there) return;
    const int begin = row.begin, end = row.end;
    const i64 first = row.first;
    const Accum softmax_scale_log2 = row.softmax_scale_log2;

    // Issue the loads of all shares before the first wait.
    Part parts[OWN];
    auto is_there = [&](int split) { return split >= begin && split < end; };
    auto load = [&](int next) {
#pragma unroll
        for (int s = 0; s < OWN; ++s)
            if (is_there(next + s)) parts[s].load(p, first + next + s, lane);
    };
    const int first_own = begin / SHARES * SHARES + share;
    load(first_own);

    RowSum total;
    for (int split = begin + lane; split < end; split += WARP)
        total.raise(sum_of(p, first + split), softmax_scale_log2);
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        RowSum other;
        other.m = __shfl_xor_sync(~0u, total.m, step), other.l = __shfl_xor_sync(~0u, total.l, step);
        other.max_first = __shfl_xor_sync(~0u, int(total.max_first), step);
        // Both lanes must keep the same one, also if the shifts are equal.
        if (lane & step) {
            const RowSum mine = total;
            total = other, other = mine;
        }
        total.raise(other, softmax_scale_log2);
    }

    Accum acc[OWN][COLUMNS] = {}, l[OWN] = {};
#pragma unroll(OWN == 1 ? 4 : 1)
    for (int next = first_own; next < end; next += SHARES) {
        if (next > first_own) load(next);
#pragma unroll
        for (int s = 0; s < OWN; ++s) {
            if (!is_there(next + s)) continue;
            const RowSum& own = parts[s].sum;
            const Accum factor = own.factor(total, softmax_scale_log2);
            l[s] = fma(own.l, factor, l[s]);
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n)
                acc[s][n] = fma(parts[s].columns[n / VECTOR].values[n % VECTOR], factor, acc[s][n]);
        }
    }

    total.l = 0;
    Element* const out = row.out;
    auto finish = [&](bool writes) { return total.finish(p, row.lse_index, row.h, writes); };
    if constexpr (WARPS_N == 1) {
#pragma unroll
        for (int s = 0; s < SHARES; ++s) total.l += l[s];
        const Accum inverse = finish(lane == 0);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            Accum all = 0;
#pragma unroll
            for (int s = 0; s < SHARES; ++s) all += acc[s][n];
            const int d = column_of(n, lane);
            if (d < p.Dv) out[d] = narrow<Element>(all * inverse);
        }
    } else {
        __shared__ Accum sums[SHARES][VALUE_DIM], totals[SHARES];
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) sums[share][column_of(n, lane)] = acc[0][n];
        if (lane == 0) totals[share] = l[0];
        __syncthreads();
        for (int s = 0; s < SHARES; ++s) total.l += totals[s];
        const Accum inverse = finish(threadIdx.x == 0);
        for (int d = threadIdx.x; d < p.Dv; d += THREADS) {
            Accum all = 0;
            for (int s = 0; s < SHARES; ++s) all += sums[s][d];
            out[d] = narrow<Element>(all * inverse);
        }
    }
}
