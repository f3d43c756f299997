// Attention, forward, by the textbook: one warp for each query. For head dimensions, or devices,
// that no tiled kernel has room for.
#include "plain.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    plain_forward(const __grid_constant__ Params p) {
    const i64 row = i64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= p.B * p.Hq * p.Nq) return;
    const i64 bh = row / p.Nq, h = bh % p.Hq;
    const Sum sink = p.sinks ? static_cast<const Sum*>(p.sinks)[h] * LOG2_E : -infinity<Sum>();
    forward_row(Head(p, bh / p.Hq, h), int(row % p.Nq), sink);
}
