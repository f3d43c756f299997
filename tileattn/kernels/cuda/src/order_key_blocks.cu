// Before the backward pass over packed sequences: order the blocks of keys.
#include "block_order.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    order_key_blocks(const __grid_constant__ Params p) {
    launch_dependents();
    pass_kernel_before();
    order_blocks<BLOCK_K>(p, p.key_ends(), p.Nk, KeyRanks{p});
}
