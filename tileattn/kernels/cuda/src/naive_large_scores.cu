// As backward_large_scores.cu, unfused: one warp for each query.
#include "naive.cuh"
#include "renormalise.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    naive_large_scores(const __grid_constant__ Params p) {
    overlap_launches();
    for_rows(p, true, [&](const NaiveRow& row) {
        const Head head(p, row.b, row.h);
        Accum m, l;
        sum_of_row(head, row.i, m, l);
        if (threadIdx.x % WARP == 0) renormalise_row(head, row.i, m, l);
    });
}
