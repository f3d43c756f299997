// Before a forward pass over packed sequences: its work tiles, and none claimed. Of blocks that take
// turns those with most keys go first. Sequences with few rows that share keys may be another kernel's.
#include "block_order.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    order_query_blocks(const __grid_constant__ Params p) {
    overlap_launches();
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.tile_counter = 0;
    order_blocks<BLOCK_Q>(p, p.query_ends(), p.Nq, QueryRanks{p});
}
