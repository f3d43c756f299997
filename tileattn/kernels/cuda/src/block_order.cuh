// Layer 3. The order of the blocks of packed sequences in persistent kernels. It is computed on the device,
// since only the device knows the lengths. Blocks of the longest sequences come first, for all heads, so
// that short ones fill the end. L2 swizzle: as many heads, and sequences of similar length, as the L2 cache
// holds are interleaved: the first block of each, then the second one, and so on.
#pragma once

#include "mask.cuh"

// Threads that compare one block with all others, and blocks that a CTA orders.
constexpr int TOGETHER = THREADS < WARP ? THREADS : WARP;
constexpr int ORDERED = THREADS / TOGETHER;

constexpr int NEAR_ENDS = 1024;  // ends of sequences that fit in shared memory

// Each block is compared with all blocks of its chunk, so that the time grows linearly with their number.
// Up to WHOLE blocks are one chunk. Otherwise chunks of CHUNK blocks, several times what runs at a time,
// follow each other, and each is ordered by itself. As in block_order.py.
constexpr int WHOLE = 4096, CHUNK = 1024;
static_assert(CHUNK % ORDERED == 0, "a CTA has numbers of one chunk");
__device__ inline int chunk_of(int numbers) { return numbers <= WHOLE ? numbers : CHUNK; }

// The number of blocks of each chunk, if there are several. count_blocks writes it after the order.
__device__ inline int* chunk_counts(const Params& p, int numbers) {
    return reinterpret_cast<int*>(p.block_order + numbers);
}

// Heads of a sequence that are interleaved have at least so many blocks for each worker. With fewer the last
// heads would end at different times: with a causal mask their blocks differ in length.
constexpr int WAVES = 4;

// The sort key of a block. Blocks with the highest `priority` come first. Blocks of equal priority are
// interleaved, by ascending rank.
struct BlockRank {
    i64 priority;
    int rank, heads;

    // `rows` is the number of rows that the longest block of the sequence visits, in whole tiles, so that
    // sequences of similar length have the same number. Numbers without a block get priority 0, the last.
    // `block` is the number of rows of a block.
    __device__ BlockRank(const Params& p, const Sequence& sequence, int rows, int block, int rank, bool exists)
        : rank(rank) {
        const int workers = int(p.swizzle_heads), Hkv = int(p.Hkv);
        const int fit = min(int(p.swizzle_rows) / max(rows, 1), workers);
        const int sequences = fit < Hkv ? 1 : fit / Hkv;
        const int wanted = max(max(fit, 1), WAVES * workers * block / max(rows, 1));
        const int groups = (Hkv + wanted - 1) / wanted;  // of heads, about equal
        priority = exists ? (i64(rows) + 1 << 32) - int(sequence.b) / sequences : 0;
        heads = (Hkv + groups - 1) / groups;
    }
};

// The sort key of a block of queries: blocks with most keys come first within a sequence.
struct QueryRanks {
    const Params& p;

    __device__ BlockRank operator()(const Sequence& sequence, int q0) const {
        const SlidingWindow window(p, sequence);
        auto keys = [&](int first) {
            const Range range = window.key_range(first, min(first + BLOCK_Q, window.Nq));
            return (range.hi + BLOCK_K - 1) / BLOCK_K - range.lo / BLOCK_K;
        };
        const int last = max(0, (window.Nq - 1) / BLOCK_Q * BLOCK_Q);
        const int rows = max(keys(0), keys(last)) * BLOCK_K;
        const bool few = PAGED && sequence.Nq * p.group <= p.max_split_rows;
        return BlockRank(p, sequence, rows, BLOCK_Q, -keys(q0), q0 < window.Nq && !few);
    }
};
// The sort key of a block of keys: blocks of a sequence stay in order, since they may wait for each other.
struct KeyRanks {
    const Params& p;

    __device__ BlockRank operator()(const Sequence& sequence, int k0) const {
        const int rows = int((sequence.Nq + ROW_PAD - 1) / ROW_PAD * ROW_PAD);
        return BlockRank(p, sequence, rows, BLOCK_K, k0, k0 < sequence.Nk);
    }
};

// Count the blocks of the chunk of this CTA.
template <int BLOCK, class Rank>
__device__ inline void count_blocks(const Params& p, const Integers& ends, i64 rows, Rank rank) {
    const int numbers = block_count<BLOCK>(p, rows), begin = int(blockIdx.x) * CHUNK;
    int count = 0;
    for (int first = begin; first < begin + CHUNK; first += THREADS) {
        const int number = first + int(threadIdx.x);
        bool exists = false;
        if (number < numbers) {
            const HeadBlock<BLOCK> at(p, ends, 1, 0, number);
            exists = rank(Sequence(p, at.b), at.block * BLOCK).priority > 0;
        }
        count += __syncthreads_count(exists);
    }
    if (threadIdx.x == 0) chunk_counts(p, numbers)[blockIdx.x] = count;
}

// Write the blocks of this CTA to their places in the order. rank(sequence, first row) is the sort key of a
// block. Blocks with equal keys keep their order. Until all threads wait for the previous kernel, they read
// only offsets and lengths of sequences.
template <int BLOCK, class Rank>
__device__ inline void order_blocks(const Params& p, const Integers& ends, i64 rows, Rank rank) {
    __shared__ int near_ends[NEAR_ENDS];
    __shared__ i64 priorities[THREADS];
    __shared__ int ranks[THREADS];
    __shared__ PackedBlock blocks[ORDERED];
    const int numbers = block_count<BLOCK>(p, rows), entries = int(p.entries);
    if (numbers == 0) return wait_for_prerequisites();
    // Binary searches read the ends one after another: keep them in shared memory if they fit.
    const bool fit = entries < NEAR_ENDS;
    for (int b = int(threadIdx.x); fit && b <= entries; b += THREADS)
        near_ends[b] = int(min(max(ends[b], i64(0)), i64(FAR)));
    __syncthreads();
    const Integers searched = fit ? Integers{near_ends, sizeof(int)} : ends;

    // Visit the blocks of the chunk cyclically, starting with this CTA's own.
    const int first_own = int(blockIdx.x) * ORDERED, chunk = chunk_of(numbers);
    const int chunk_begin = first_own / chunk * chunk, chunk_end = min(chunk_begin + chunk, numbers);
    const int end = first_own + chunk_end - chunk_begin;
    const int slot = int(threadIdx.x) / TOGETHER, own = first_own + slot;
    i64 priority = 0;
    int rank_of_own = 0, count = 0, first = 0, together = 0, before = 0, base = 0;
    for (int start = first_own; start < end; start += THREADS) {
        const int given = start + int(threadIdx.x);
        const int number = given < chunk_end ? given : given - (chunk_end - chunk_begin);
        const HeadBlock<BLOCK> at(p, searched, 1, 0, number);
        const Sequence sequence(p, at.b);
        const BlockRank its = rank(sequence, at.block * BLOCK);
        __syncthreads();  // all threads have read the previous ranks
        priorities[threadIdx.x] = its.priority, ranks[threadIdx.x] = its.rank;
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
        if (start == first_own) priority = priorities[slot], rank_of_own = ranks[slot];
        const int compared = min(THREADS, end - start);
#pragma unroll 4
        for (int n = int(threadIdx.x) % TOGETHER; n < compared; n += TOGETHER) {
            const bool alike = priorities[n] == priority, earlier = start + n < own || start + n >= chunk_end;
            count += priorities[n] > 0;
            first += priorities[n] > priority;
            together += alike;
            before += alike && ranks[n] < rank_of_own + earlier;
        }
    }
    wait_for_prerequisites();
    if (chunk < numbers) {
        count = 0;  // of all chunks
        for (int n = int(threadIdx.x) % TOGETHER; n * chunk < numbers; n += TOGETHER) {
            const int there = chunk_counts(p, numbers)[n];
            count += there, base += n * chunk < chunk_begin ? there : 0;
        }
    }
#pragma unroll
    for (int step = TOGETHER / 2; step; step /= 2) {
        base += __shfl_xor_sync(~0u, base, step);
        count += __shfl_xor_sync(~0u, count, step);
        first += __shfl_xor_sync(~0u, first, step);
        together += __shfl_xor_sync(~0u, together, step);
        before += __shfl_xor_sync(~0u, before, step);
    }
    if (own >= numbers || threadIdx.x % TOGETHER) return;
    PackedBlock block = blocks[slot];
    block.count = count, block.first = base + first, block.together = together;
    // Numbers without a block come after all blocks.
    p.block_order[priority > 0 ? base + first + before : count + chunk_begin - base + before] = block;
}
