// Layer 3. The order in which persistent kernels work on the blocks of packed sequences, made on the
// device: nobody else may know the lengths. The longest go first.
#pragma once

#include "mask.cuh"

// Write this thread's block to its place in the order. cost(sequence, first row) says how long a block
// takes, and 0 where there is none; of two that take as long the first goes first.
template <int BLOCK, class Cost>
__device__ inline void order_blocks(const Params& p, const i64* cu_seqlens, i64 rows, Cost cost) {
    __shared__ int costs[THREADS];
    const int count = block_count<BLOCK>(p, rows);
    const int own = int(blockIdx.x) * THREADS + int(threadIdx.x);
    auto cost_of = [&](int number) {
        const HeadBlock<BLOCK> at(p, cu_seqlens, 1, 0, number);
        return cost(Sequence(p, at.b), at.block * BLOCK);
    };
    const int mine = own < count ? cost_of(own) : 0;
    int place = 0;
    for (int first = 0; first < count; first += THREADS) {
        const int number = first + int(threadIdx.x);
        __syncthreads();  // all threads have read the last costs
        costs[threadIdx.x] = number < count ? cost_of(number) : -1;
        __syncthreads();
#pragma unroll 4
        for (int n = 0; n < THREADS; ++n)
            place += costs[n] > mine || (costs[n] == mine && first + n < own);
    }
    if (own >= count) return;
    const HeadBlock<BLOCK> at(p, cu_seqlens, 1, 0, own);
    const Sequence sequence(p, at.b);
    p.block_order[place] = {at.b,
                            at.block,
                            int(sequence.q_start),
                            int(sequence.k_start),
                            int(sequence.Nq),
                            int(sequence.Nk),
                            {}};
}
