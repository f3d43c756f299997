// Layer 3. The order in which persistent kernels work on the blocks of packed sequences, made on the
// device: nobody else may know the lengths. Those of the longest sequences go first, for all heads, so
// that short ones are left for the end. As many heads, and sequences of a length, as the L2 cache holds
// take turns: first the first block of each, then the second one.
#pragma once

#include "mask.cuh"

// Threads that compare one block with all others; a CTA finds the places of so many blocks.
constexpr int TOGETHER = THREADS < WARP ? THREADS : WARP;
constexpr int ORDERED = THREADS / TOGETHER;

constexpr int NEAR_ENDS = 1024;  // of sequences, that shared memory has room for

// What decides about the place of a block: the longest go first. Its sequence takes turns with others
// of the same `turn`, those of the lowest rank first.
struct BlockRank {
    i64 turn;
    int rank, heads;

    // `rows` are those that the longest blocks of the sequence go through, in whole tiles: sequences that
    // are about as long have as many. What is no block comes last.
    __device__ BlockRank(const Params& p, const Sequence& sequence, int rows, int rank, bool exists)
        : rank(rank) {
        const int fit = max(1, min(int(p.turn_rows) / max(rows, 1), int(p.turn_heads)));
        const int Hkv = int(p.Hkv), sequences = fit < Hkv ? 1 : fit / Hkv;
        turn = exists ? (i64(rows) + 1 << 32) - int(sequence.b) / sequences : 0;
        heads = min(fit, Hkv);
    }
};

// Write blocks to their places in the order. rank(sequence, first row) is that of a block. Of two that
// are alike the first goes first.
template <int BLOCK, class Rank>
__device__ inline void order_blocks(const Params& p, const Integers& ends, i64 rows, Rank rank) {
    __shared__ int near_ends[NEAR_ENDS];
    __shared__ i64 turns[THREADS];
    __shared__ int ranks[THREADS];
    __shared__ PackedBlock blocks[ORDERED];
    const int numbers = block_count<BLOCK>(p, rows), entries = int(p.entries);
    if (numbers == 0) return;
    // A search takes one end after the other: they are near, if there is room.
    const bool fit = entries < NEAR_ENDS;
    for (int b = int(threadIdx.x); fit && b <= entries; b += THREADS)
        near_ends[b] = int(min(max(ends[b], i64(0)), i64(FAR)));
    __syncthreads();
    const Integers searched = fit ? Integers{near_ends, sizeof(int)} : ends;

    // All numbers in a circle, from the first that is this CTA's own.
    const int first_own = int(blockIdx.x) * ORDERED, end = first_own + numbers;
    const int slot = int(threadIdx.x) / TOGETHER, own = first_own + slot;
    i64 turn = 0;
    int rank_of_own = 0, count = 0, first = 0, together = 0, before = 0;
    for (int start = first_own; start < end; start += THREADS) {
        const int given = start + int(threadIdx.x), number = given < numbers ? given : given - numbers;
        const HeadBlock<BLOCK> at(p, searched, 1, 0, number);
        const Sequence sequence(p, at.b);
        const BlockRank its = rank(sequence, at.block * BLOCK);
        __syncthreads();  // all threads have read the last ranks
        turns[threadIdx.x] = its.turn, ranks[threadIdx.x] = its.rank;
        if (given < first_own + ORDERED)
            blocks[threadIdx.x] = {at.b,
                                   at.block,
                                   int(sequence.q_start),
                                   int(sequence.k_start),
                                   int(sequence.Nq),
                                   int(sequence.Nk),
                                   0,
                                   0,
                                   0,
                                   its.heads,
                                   {}};
        __syncthreads();
        if (start == first_own) turn = turns[slot], rank_of_own = ranks[slot];
        const int compared = min(THREADS, end - start);
#pragma unroll 4
        for (int n = int(threadIdx.x) % TOGETHER; n < compared; n += TOGETHER) {
            const bool alike = turns[n] == turn, earlier = start + n < own || start + n >= numbers;
            count += turns[n] > 0;
            first += turns[n] > turn;
            together += alike;
            before += alike && ranks[n] < rank_of_own + earlier;
        }
    }
#pragma unroll
    for (int step = TOGETHER / 2; step; step /= 2) {
        count += __shfl_xor_sync(~0u, count, step);
        first += __shfl_xor_sync(~0u, first, step);
        together += __shfl_xor_sync(~0u, together, step);
        before += __shfl_xor_sync(~0u, before, step);
    }
    if (own >= numbers || threadIdx.x % TOGETHER) return;
    PackedBlock block = blocks[slot];
    block.count = count, block.first = first, block.together = together;
    p.block_order[first + before] = block;
}
