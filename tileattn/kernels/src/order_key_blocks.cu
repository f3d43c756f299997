// Before a backward pass over packed sequences: its work tiles, those of the longest sequences first.
// Blocks of one sequence stay in the order of their keys, in which they may wait for each other. Those
// of sequences about as long take turns: fewer then add to the same dQ at a time.
#include "block_order.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    order_key_blocks(const __grid_constant__ Params p) {
    order_blocks<BLOCK_K>(p, p.key_ends(), p.Nk, [&](const Sequence& sequence, int k0) {
        const i64 tiles = (sequence.Nq + ROW_PAD - 1) / ROW_PAD;
        return k0 < sequence.Nk ? (tiles + 1 << 32) - k0 : 0;
    });
}
