// Layer 3. Counters that tell when dQ_accum of a key head is complete, while Hopper's backward kernel
// still runs. A converting CTA reads its counter once; if dQ_accum is incomplete it waits for the kernel.
// Packed sequences have no counters.
#pragma once

#include "sequence.cuh"
#include "tma_sm90.cuh"

// The dQ store threads of a work tile together add this number to the counter of its head.
constexpr u32 DQ_COUNT = 2;

// A dQ store thread calls this when its adds for a work tile are complete. `head` is the index among the
// key heads of all batch entries.
__device__ inline void count_dq(const Params& p, i64 head, u32 count) {
    if constexpr (!PACKED) add_to_semaphore(p.dq_counter + head, count);
}

// True if dQ_accum of a head is complete. Then this thread sees what the store threads have written, and
// everything that was complete before their kernel began. Heads that Hopper's kernels skip are never
// complete.
__device__ inline bool dq_is_complete(const Params& p, i64 head) {
    const u32 work_tiles = u32(p.head_splits * p.query_splits) * u32(block_count<BLOCK_K>(p, p.Nk));
    return !PACKED && read_semaphore(p.dq_counter + head) == DQ_COUNT * work_tiles;
}

// The dQ tile that CTA n converts; each query head has `tiles`. Tiles of the last group of heads, which is
// complete last, come at the end. All others come in reverse: the L2 cache may still hold the latest.
__device__ inline int dq_tile(const Params& p, int tiles, int n) {
    const i64 splits = p.head_splits * p.query_splits, last_splits = p.B * p.Hkv * splits / p.head_groups;
    const int last = int((last_splits + splits - 1) / splits * p.group) * tiles;
    const int others = int(p.B * p.Hq) * tiles - last;
    return n < others ? others - 1 - n : n;
}
