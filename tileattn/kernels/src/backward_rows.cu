// Before the backward pass, one warp for each query: delta = rowsum(dout * out) - dlse, and the
// logsumexp in units of log 2, 0 in place of -infinity. Mirrors _delta in numpy_backward.py.
#include "plain.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    backward_rows(const __grid_constant__ Params p) {
    const i64 row = i64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= p.B * p.Hq * p.Nq) return;
    const i64 b = row / (p.Hq * p.Nq), h = row / p.Nq % p.Hq, i = row % p.Nq;
    const Element* out = rows_of<Element>(p.out, p.out_at, b, h) + i * p.out_at.n;
    const Element* dout = rows_of<Element>(p.dout, p.dout_at, b, h) + i * p.dout_at.n;
    Sum delta = 0;
    for (int d = threadIdx.x % WARP; d < p.Dv; d += WARP)
        delta = fma(Sum(widen(dout[d])), Sum(widen(out[d])), delta);
    delta = warp_sum(delta);
    if (threadIdx.x % WARP) return;
    if (p.dlse) delta -= rows_of<Sum>(p.dlse, p.dlse_at, b, h)[i * p.dlse_at.n];
    static_cast<Sum*>(p.delta)[row] = delta;
    const Sum lse = static_cast<const Sum*>(p.lse)[row];
    static_cast<Sum*>(p.shift)[row] = lse == -infinity<Sum>() ? Sum(0) : lse * LOG2_E;
}
