// Add up the sums over the splits of each row, one after another, in the order of the keys: as forward_sm90
// adds up the sums over parts of its keys with INVARIANT, so that a row has the same bits in both. A row has a
// warp.
#include "partial_sums.cuh"

constexpr int AHEAD = 8;  // splits that are loaded at once

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    forward_fold(const __grid_constant__ Params p) {
    launch_dependents();
    pass_kernel_before();  // lengths and offsets were complete before that kernel began
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const SplitRow row(p, int(blockIdx.x) * WARPS_M + warp);
    wait_for_prerequisites();
    if (!row.is_there) return;
    RowSum total;
    Accum acc[COLUMNS] = {};
    for (int next = row.begin; next < row.end; next += AHEAD) {
        Part parts[AHEAD];
#pragma unroll
        for (int s = 0; s < AHEAD; ++s)
            if (next + s < row.end) parts[s].load(p, row.first + next + s, lane);
#pragma unroll
        for (int s = 0; s < AHEAD; ++s) {
            if (next + s >= row.end) continue;
            const RowSum::Factors factors = total.add(parts[s].sum, row.softmax_scale_log2);
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n)
                acc[n] = factors.sum(acc[n], parts[s].columns[n / VECTOR].values[n % VECTOR]);
        }
    }
    const Accum inverse = total.finish(p, row.lse_index, row.h);
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        const int d = column_of(n, lane);
        if (d < p.Dv) row.out[d] = narrow<Element>(acc[n] * inverse);
    }
}
