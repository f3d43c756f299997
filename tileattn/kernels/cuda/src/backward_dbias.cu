// dbias of a bias that is broadcast (dbias.cuh): one CTA for each tile of the bias.
#include "dbias.cuh"
#include "ds_tiles.cuh"

static_assert(SHARES_BYTES <= DS_BYTES, "warps exchange sums where the tiles were");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_dbias(const __grid_constant__ Params p) {
    overlap_launches();
    extern __shared__ __align__(1024) char memory[];
    sum_dbias(DbiasTile(p, blockIdx.x), memory, [&](const Steps& steps, auto add) {
        for_each_ds(p, steps, memory, add);
    });
}
