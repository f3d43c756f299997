// backward_large_scores, unfused: one warp for each query.
#include "naive.cuh"
#include "renormalise.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    naive_large_scores(const __grid_constant__ Params p) {
    const i64 row = i64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= p.B * p.Hq * p.Nq) return;
    const i64 bh = row / p.Nq;
    const Head head(p, bh / p.Hq, bh % p.Hq);
    if (!head.is_large()) return;
    Accum m, l;
    sum_of_row(head, int(row % p.Nq), m, l);
    if (threadIdx.x % WARP == 0) renormalise_row(head, int(row % p.Nq), m, l);
}
