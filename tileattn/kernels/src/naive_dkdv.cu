// Backward pass for k and v, unfused: one warp for each key.
#include "naive.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    naive_dkdv(const __grid_constant__ Params p) {
    const i64 row = i64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= p.B * p.Hkv * p.Nk) return;
    const i64 bh = row / p.Nk;
    key_row(p, bh / p.Hkv, bh % p.Hkv, int(row % p.Nk));
}
