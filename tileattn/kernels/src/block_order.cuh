// Layer 3. The order in which persistent kernels work on the blocks of packed sequences, made on the
// device: nobody else may know the lengths. The longest go first.
#pragma once

#include "mask.cuh"

// Threads that compare one block with all others; a CTA finds the places of so many blocks.
constexpr int TOGETHER = THREADS < 8 ? THREADS : 8;
constexpr int ORDERED = THREADS / TOGETHER;

// Write a block to its place in the order. cost(sequence, first row) says how long a block takes, and
// 0 where there is none: those come last. Of two that take as long the first goes first.
template <int BLOCK, class Cost>
__device__ inline void order_blocks(const Params& p, const Integers& ends, i64 rows, Cost cost) {
    using Number = decltype(cost(Sequence(p, 0), 0));
    __shared__ Number costs[THREADS];
    const int numbers = block_count<BLOCK>(p, rows), share = int(threadIdx.x) % TOGETHER;
    const int own = int(blockIdx.x) * ORDERED + int(threadIdx.x) / TOGETHER;
    if (numbers == 0) return;
    const HeadBlock<BLOCK> at(p, ends, 1, 0, own);
    const Sequence sequence(p, at.b);
    const Number mine = cost(sequence, at.block * BLOCK);
    int place = 0, count = 0;
    for (int first = 0; first < numbers; first += THREADS) {
        const int number = first + int(threadIdx.x);
        __syncthreads();  // all threads have read the last costs
        if (number < numbers) {
            const HeadBlock<BLOCK> other(p, ends, 1, 0, number);
            costs[threadIdx.x] = cost(Sequence(p, other.b), other.block * BLOCK);
        }
        __syncthreads();
        const int compared = min(THREADS, numbers - first);
#pragma unroll 4
        for (int n = share; n < compared; n += TOGETHER) {
            place += costs[n] > mine || (costs[n] == mine && first + n < own);
            count += costs[n] > 0;
        }
    }
#pragma unroll
    for (int step = TOGETHER / 2; step; step /= 2) {
        place += __shfl_xor_sync(~0u, place, step);
        count += __shfl_xor_sync(~0u, count, step);
    }
    if (own >= numbers || share > 0) return;
    p.block_order[place] = {at.b,
                            at.block,
                            int(sequence.q_start),
                            int(sequence.k_start),
                            int(sequence.Nq),
                            int(sequence.Nk),
                            count,
                            0};
}
