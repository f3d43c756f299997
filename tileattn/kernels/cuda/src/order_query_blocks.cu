// Before the forward pass over packed sequences: order the blocks of queries, and reset the dynamic
// scheduler. Sequences that forward_split computes are left out.
#include "block_order.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    order_query_blocks(const __grid_constant__ Params p) {
    overlap_launches();
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.tile_counter = 0;
    order_blocks<BLOCK_Q>(p, p.query_ends(), p.Nq, QueryRanks{p});
}
