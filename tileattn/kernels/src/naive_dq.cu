// Backward pass for q, unfused: one warp for each query.
#include "naive.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    naive_dq(const __grid_constant__ Params p) {
    const i64 row = i64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= p.B * p.Hq * p.Nq) return;
    const i64 bh = row / p.Nq;
    query_row(p, bh / p.Hq, bh % p.Hq, int(row % p.Nq));
}
