// After the backward pass over keys: dq in its own type and times the scale, one warp for each
// query.
#include "plain.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    backward_finish(const __grid_constant__ Params p) {
    const i64 row = i64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= p.B * p.Hq * p.Nq) return;
    const i64 b = row / (p.Hq * p.Nq), h = row / p.Nq % p.Hq;
    const int i = int(row % p.Nq);
    const Sum* sum = static_cast<const Sum*>(p.dq_sum) + row * HEAD_DIM;
    Element* dq = rows_of<Element>(p.dq, p.dq_at, b, h) + i * p.dq_at.n;
    bool good = true;
    for (int d = threadIdx.x % WARP; d < p.D; d += WARP) {
        const Sum x = sum[d] * Sum(p.scale);
        good = good && is_finite(x);
        dq[d] = narrow<Element>(x);
    }
    if (!__all_sync(~0u, good)) query_row(Head(p, b, h), i);
}
