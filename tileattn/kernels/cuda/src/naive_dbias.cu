// dbias, unfused: one warp for each element of the bias sums over all scores that the element is
// broadcast to.
#include "naive.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    naive_dbias(const __grid_constant__ Params p) {
    overlap_launches();
    const i64 element = i64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    if (element >= p.bias_B * p.bias_H * p.bias_Nq * p.bias_Nk) return;
    const i64 j = element % p.bias_Nk, i = element / p.bias_Nk % p.bias_Nq;
    const i64 h = element / (p.bias_Nk * p.bias_Nq) % p.bias_H;
    const i64 b = element / (p.bias_Nk * p.bias_Nq * p.bias_H);
    // The pairs along the axes of length 1, last axis fastest.
    const i64 keys = p.bias_Nk == 1 ? p.Nk : 1, queries = p.bias_Nq == 1 ? p.Nq : 1;
    const i64 heads = p.bias_H == 1 ? p.Hq : 1, entries = p.bias_B == 1 ? p.B : 1;
    Accum total = 0;
    for (i64 n = threadIdx.x % WARP; n < keys * queries * heads * entries; n += WARP) {
        const Head head(p, b + n / (keys * queries * heads), h + n / (keys * queries) % heads);
        total += pair_gradient(head, int(i + n / keys % queries), int(j + n % keys)).ds;
    }
    total = warp_sum(total);
    if (threadIdx.x % WARP) return;
    static_cast<BiasElement*>(
        p.dbias)[b * p.dbias_at.b + h * p.dbias_at.h + i * p.dbias_at.i + j * p.dbias_at.j] =
        narrow<BiasElement>(total);
}
