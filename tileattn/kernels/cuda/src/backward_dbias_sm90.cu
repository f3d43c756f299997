// dbias on Hopper (dbias.cuh). CTAs are persistent: the next tile of the bias loads while one is
// written.
#include "dbias.cuh"
#include "ds_tiles_sm90.cuh"

static_assert(DS_BYTES + SHARES_BYTES == SHARED_BYTES, "what a launch brings");

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, MIN_BLOCKS_PER_SM)
    backward_dbias_sm90(const __grid_constant__ Params p, const __grid_constant__ BackwardMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    auto for_tiles = [&](auto run) {
#pragma unroll 1
        for (i64 n = blockIdx.x; n < dbias_tiles(p); n += gridDim.x) run(DbiasTile(p, n));
    };
    run_ds(
        p, maps, memory,
        [&](DsProducer& producer) {
            for_tiles([&](const DbiasTile& tile) { producer.load(tile.steps()); });
        },
        [&](DsConsumer& consumer) {
            for_tiles([&](const DbiasTile& tile) {
                sum_dbias(tile, memory + DS_BYTES, [&](const Steps& steps, auto add) {
                    consumer.for_each_ds(steps, add);
                });
            });
        });
}
