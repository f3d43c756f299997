// Before a forward pass over packed sequences: its work tiles, and none claimed. Of blocks that take
// turns those with most keys go first. Sequences with few rows that share keys may be another kernel's.
#include "block_order.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    order_query_blocks(const __grid_constant__ Params p) {
    overlap_launches();
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.tile_counter = 0;
    order_blocks<BLOCK_Q>(p, p.query_ends(), p.Nq, [&](const Sequence& sequence, int q0) {
        const SlidingWindow window(p, sequence);
        auto keys = [&](int first) {
            const Range range = window.key_range(first, min(first + BLOCK_Q, window.Nq));
            return (range.hi + BLOCK_K - 1) / BLOCK_K - range.lo / BLOCK_K;
        };
        const int last = max(0, (window.Nq - 1) / BLOCK_Q * BLOCK_Q);
        const int rows = max(keys(0), keys(last)) * BLOCK_K;
        const bool few = PAGED && sequence.Nq * p.group <= p.few_rows;
        return BlockRank(p, sequence, rows, -keys(q0), q0 < window.Nq && !few);
    });
}
