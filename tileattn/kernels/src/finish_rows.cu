// Round joined results to the type of the output, once; a sink of each head joins the denominator
// before, if there is one. A warp for each row.
#include "partial_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    finish_rows(Element* out, Accum* lse, const Accum* sums, const Accum* sinks, i64 count,
                i64 rows, i64 heads, i64 columns) {
    const int lane = threadIdx.x % WARP;
    const i64 warps = i64(gridDim.x) * (THREADS / WARP);
    i64 at = i64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    for (; at < count; at += warps) {
        const Accum own = lse[at];
        Accum weight = 1;
        if (sinks) {
            const Joined both(own, sinks[at / rows % heads]);
            weight = both.first;
            __syncwarp();  // all lanes have read the logsumexp
            if (lane == 0) lse[at] = both.lse;
        }
#pragma unroll 4
        for (i64 c = lane; c < columns; c += WARP)
            out[at * columns + c] = narrow<Element>(weighted(weight, sums[at * columns + c], own));
    }
}
