// Before order_query_blocks, if there are several chunks: count the blocks of each chunk.
#include "block_order.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    count_query_blocks(const __grid_constant__ Params p) {
    overlap_launches();
    count_blocks<BLOCK_Q>(p, p.query_ends(), p.Nq, QueryRanks{p});
}
