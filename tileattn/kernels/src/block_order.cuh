// Layer 3. The order in which persistent kernels work on the blocks of packed sequences, made on the
// device: nobody else may know the lengths. Those of the longest sequences go first, for all heads, so
// that short ones are left for the end. As many heads, and sequences of a length, as the L2 cache holds
// take turns: first the first block of each, then the second one.
#pragma once

#include "mask.cuh"

// Threads that compare one block with all others; a CTA finds the places of so many blocks.
constexpr int TOGETHER = THREADS < 8 ? THREADS : 8;
constexpr int ORDERED = THREADS / TOGETHER;

// What decides about the place of a block: the longest go first. Its sequence takes turns with others
// of the same `turn`, those of the lowest rank first.
struct BlockRank {
    i64 turn;
    int rank, head_groups;

    // `rows` are those that the longest blocks of the sequence go through, in whole tiles: sequences that
    // are about as long have as many. What is no block comes last.
    __device__ BlockRank(const Params& p, const Sequence& sequence, int rows, int rank, bool exists)
        : rank(rank) {
        const int heads = int(max(i64(1), min(p.turn_rows / max(rows, 1), p.turn_heads)));
        const int sequences = max(1, heads / int(p.Hkv));
        turn = exists ? (i64(rows) + 1 << 32) - sequence.b / sequences : 0;
        head_groups = (int(p.Hkv) + heads - 1) / heads;
    }
};

// Write a block to its place in the order. rank(sequence, first row) is that of a block. Of two that
// are alike the first goes first.
template <int BLOCK, class Rank>
__device__ inline void order_blocks(const Params& p, const Integers& ends, i64 rows, Rank rank) {
    __shared__ i64 turns[THREADS];
    __shared__ int ranks[THREADS];
    const int numbers = block_count<BLOCK>(p, rows), share = int(threadIdx.x) % TOGETHER;
    const int own = int(blockIdx.x) * ORDERED + int(threadIdx.x) / TOGETHER;
    if (numbers == 0) return;
    const HeadBlock<BLOCK> at(p, ends, 1, 0, own);
    const Sequence sequence(p, at.b);
    const BlockRank mine = rank(sequence, at.block * BLOCK);
    int count = 0, first = 0, together = 0, before = 0;
    for (int start = 0; start < numbers; start += THREADS) {
        const int number = start + int(threadIdx.x);
        __syncthreads();  // all threads have read the last ranks
        if (number < numbers) {
            const HeadBlock<BLOCK> other(p, ends, 1, 0, number);
            const BlockRank its = rank(Sequence(p, other.b), other.block * BLOCK);
            turns[threadIdx.x] = its.turn, ranks[threadIdx.x] = its.rank;
        }
        __syncthreads();
        const int compared = min(THREADS, numbers - start);
#pragma unroll 4
        for (int n = share; n < compared; n += TOGETHER) {
            const bool alike = turns[n] == mine.turn;
            count += turns[n] > 0;
            first += turns[n] > mine.turn;
            together += alike;
            before += alike && ranks[n] < mine.rank + (start + n < own);
        }
    }
#pragma unroll
    for (int step = TOGETHER / 2; step; step /= 2) {
        count += __shfl_xor_sync(~0u, count, step);
        first += __shfl_xor_sync(~0u, first, step);
        together += __shfl_xor_sync(~0u, together, step);
        before += __shfl_xor_sync(~0u, before, step);
    }
    if (own >= numbers || share > 0) return;
    p.block_order[first + before] = {at.b,
                                     at.block,
                                     int(sequence.q_start),
                                     int(sequence.k_start),
                                     int(sequence.Nq),
                                     int(sequence.Nk),
                                     count,
                                     first,
                                     together,
                                     mine.head_groups,
                                     {}};
}
