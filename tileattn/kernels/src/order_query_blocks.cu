// Before a forward pass over packed sequences: its work tiles, those with most keys first, and none
// claimed. Sequences with few rows that share keys may be another kernel's.
#include "block_order.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    order_query_blocks(const __grid_constant__ Params p) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.tile_counter = 0;
    order_blocks<BLOCK_Q>(p, p.query_ends(), p.Nq, [&](const Sequence& sequence, int q0) {
        const int end = min(q0 + BLOCK_Q, int(sequence.Nq));
        const Range keys = SlidingWindow(p, sequence).key_range(q0, end);
        if (PAGED && sequence.Nq * p.group <= p.few_rows) return 0;
        return q0 < end ? 1 + (keys.hi + BLOCK_K - 1) / BLOCK_K - keys.lo / BLOCK_K : 0;
    });
}
