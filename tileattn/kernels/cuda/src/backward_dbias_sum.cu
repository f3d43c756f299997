// Add up the copies of dbias into which CTAs have summed (dbias.cuh, backward_dkdv.cu), in a fixed order. If
// there are few elements, a CTA has 32 of them, and each of its warps adds some of the copies. Otherwise
// each thread has an element. The grid tells which: grid.py.
#include "params.cuh"

constexpr int LOADS = 16;  // of a thread at a time

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_dbias_sum(const __grid_constant__ Params p) {
    overlap_launches();
    if (p.dbias_copies == 1) return;  // it is dbias
    const i64 elements = p.bias_B * p.bias_H * p.bias_Nq * p.bias_Nk;
    const bool few = i64(gridDim.x) * WARP >= elements;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i64 n = i64(blockIdx.x) * (few ? WARP : THREADS) + (few ? lane : threadIdx.x);
    const int first = few ? warp : 0, step = few ? WARPS_M : 1;
    const i64 stride = step * elements;
    const Accum* next = static_cast<const Accum*>(p.dbias_sums) + first * elements + min(n, elements - 1);
    Accum total = 0;
#pragma unroll 1
    for (int left = int(p.dbias_copies) - first; left > 0; left -= LOADS * step) {
        Accum own[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i, next += stride) own[i] = i * step < left ? *next : 0;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) total += own[i];
    }
    if (few) {
        __shared__ Accum sums[WARPS_M][WARP];
        sums[warp][lane] = total;
        __syncthreads();
        if (warp > 0) return;
        for (int w = 1; w < WARPS_M; ++w) total += sums[w][lane];
    }
    if (n < elements) static_cast<BiasElement*>(p.dbias)[n] = narrow<BiasElement>(total);
}
