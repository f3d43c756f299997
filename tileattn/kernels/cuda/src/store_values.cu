// Write integers of the host, which the launch passes by value, to memory: nothing is uploaded, and a stream
// capture records the values.
#include "config.cuh"

struct Values {
    u64* to;
    i64 count;
    u64 values[448];  // as many as VALUES of driver_launch.py
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    store_values(const __grid_constant__ Values p) {
    for (i64 i = threadIdx.x; i < p.count; i += THREADS) p.to[i] = p.values[i];
}
