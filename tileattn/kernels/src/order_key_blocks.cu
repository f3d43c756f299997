// Before a backward pass over packed sequences: its work tiles. Blocks of one sequence stay in the order
// of their keys, in which they may wait for each other.
#include "block_order.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    order_key_blocks(const __grid_constant__ Params p) {
    overlap_launches();
    order_blocks<BLOCK_K>(p, p.key_ends(), p.Nk, [&](const Sequence& sequence, int k0) {
        const int rows = int((sequence.Nq + ROW_PAD - 1) / ROW_PAD * ROW_PAD);
        return BlockRank(p, sequence, rows, k0, k0 < sequence.Nk);
    });
}
