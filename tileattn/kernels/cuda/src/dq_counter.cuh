// Layer 3. Whether the sums of dQ of a key head are complete, while Hopper's backward kernel runs. A
// CTA looks once, and waits for that kernel if they are not. Of packed sequences nobody counts.
#pragma once

#include "sequence.cuh"
#include "tma_sm90.cuh"

// What the dQ store threads of a key block add to the counter of its head, all together.
constexpr u32 DQ_COUNT = 2;

// By a dQ store thread whose adds for a key block are complete. `head` counts key heads of all batch
// entries.
__device__ inline void count_dq(const Params& p, i64 head, u32 count) {
    if constexpr (!PACKED) add_to_semaphore(p.dq_counter + head, count);
}

// If so, all that the store threads have written is there for this thread, and all that was complete
// before their kernel began. Heads that Hopper's kernels skip are never complete.
__device__ inline bool dq_is_complete(const Params& p, i64 head) {
    return !PACKED &&
           read_semaphore(p.dq_counter + head) == DQ_COUNT * u32(block_count<BLOCK_K>(p, p.Nk));
}

// Of `tiles` of each query head the one that CTA n converts. Those of the last group of heads, which are
// complete last, come behind all others. Of these the last come first: the L2 cache may still have them.
__device__ inline int dq_tile(const Params& p, int tiles, int n) {
    const int last = int(p.B * p.Hkv / p.head_groups * p.group) * tiles;
    const int others = int(p.B * p.Hq) * tiles - last;
    return n < others ? others - 1 - n : n;
}
