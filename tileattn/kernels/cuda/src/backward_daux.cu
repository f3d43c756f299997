// The gradient of an array that score_mod reads (daux.cuh).
#include "daux.cuh"
#include "ds_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_daux(const __grid_constant__ Params p) {
    overlap_launches();
    extern __shared__ __align__(1024) char memory[];
    sum_daux<DS_BYTES>(p, memory, [&](const Steps& steps, auto add) {
        for_each_ds(p, steps, memory, add);
    });
}
