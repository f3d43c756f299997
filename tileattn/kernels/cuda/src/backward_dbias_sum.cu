// Add up the copies of dbias into which CTAs have summed (dbias.cuh), in a fixed order. Each warp adds some
// of the copies of all elements of its CTA.
#include "params.cuh"

constexpr int LANE_ELEMENTS = 4;
constexpr int ELEMENTS = LANE_ELEMENTS * WARP;  // of a CTA: the grid counts on it

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_dbias_sum(const __grid_constant__ Params p) {
    overlap_launches();
    if (p.dbias_copies == 1) return;  // it is dbias
    __shared__ Accum sums[WARPS_M][ELEMENTS];
    const i64 elements = p.bias_B * p.bias_H * p.bias_Nq * p.bias_Nk;
    const i64 first = i64(blockIdx.x) * ELEMENTS;
    const int count = int(min(i64(ELEMENTS), elements - first));
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Accum own[LANE_ELEMENTS] = {};
#pragma unroll 4
    for (i64 copy = warp; copy < p.dbias_copies; copy += WARPS_M) {
        const Accum* const from = static_cast<const Accum*>(p.dbias_sums) + copy * elements + first;
#pragma unroll
        for (int e = 0; e < LANE_ELEMENTS; ++e) own[e] += from[min(lane + e * WARP, count - 1)];
    }
#pragma unroll
    for (int e = 0; e < LANE_ELEMENTS; ++e) sums[warp][lane + e * WARP] = own[e];
    __syncthreads();
    for (int n = threadIdx.x; n < count; n += THREADS) {
        Accum total = 0;
        for (int w = 0; w < WARPS_M; ++w) total += sums[w][n];
        static_cast<BiasElement*>(p.dbias)[first + n] = narrow<BiasElement>(total);
    }
}
