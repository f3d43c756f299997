// The gradient of an array that score_mod reads, on Hopper (daux.cuh).
#include "daux.cuh"
#include "ds_tiles_sm90.cuh"

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, MIN_BLOCKS_PER_SM)
    backward_daux_sm90(const __grid_constant__ Params p, const __grid_constant__ BackwardMaps maps) {
    extern __shared__ __align__(1024) char memory[];
    run_ds(
        p, maps, memory, [&](DsProducer& producer) { producer.load(daux_steps(p)); },
        [&](DsConsumer& consumer) {
            sum_daux<DS_BYTES>(p, memory, [&](const Steps& steps, auto add) {
                consumer.for_each_ds(steps, add);
            });
        });
}
