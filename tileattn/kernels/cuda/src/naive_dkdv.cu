// Backward pass for k and v, unfused: one warp for each key.
#include "naive.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    naive_dkdv(const __grid_constant__ Params p) {
    overlap_launches();
    for_rows(p, false, [&](const NaiveRow& row) { key_row(p, row.b, row.h, row.i); });
}
