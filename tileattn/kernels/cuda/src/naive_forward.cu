// Forward pass, unfused: one warp for each query.
#include "naive.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    naive_forward(const __grid_constant__ Params p) {
    overlap_launches();
    for_rows(p, true, [&](const NaiveRow& row) { forward_row(p, row.b, row.h, row.i); });
}
