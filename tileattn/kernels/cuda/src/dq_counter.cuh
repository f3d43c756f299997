// Layer 3. Counters that tell when dQ_accum of a key head is complete, while Hopper's backward kernel
// still runs. A converting CTA reads its counter once; if dQ_accum is incomplete it waits for the kernel.
#pragma once

#include "sequence.cuh"
#include "tma_sm90.cuh"

// The dQ store threads of a work tile together add this number to the counter of its head.
constexpr u32 DQ_COUNT = 2;

// A dQ store thread calls this when its adds for a work tile of sequence b are complete.
__device__ inline void count_dq(const Params& p, int b, int kv, u32 count) {
    add_to_semaphore(p.dq_counter + (b * p.Hkv + kv), count);
}

// True if dQ_accum of a key head of a sequence is complete. Then this thread sees what the store threads
// have written, and everything that was complete before their kernel began. Heads that Hopper's kernels
// skip are never complete.
__device__ inline bool dq_is_complete(const Params& p, const Sequence& sequence, int kv) {
    const u32 blocks = u32(sequence.Nk + BLOCK_K - 1) / BLOCK_K;
    const u32 work_tiles = u32(p.head_splits * p.query_splits) * blocks;
    return read_semaphore(p.dq_counter + (sequence.b * p.Hkv + kv)) == DQ_COUNT * work_tiles;
}

// The dQ tile that CTA n converts; each query head has `tiles`. Tiles of the last group of heads, which is
// complete last, come at the end. All others come in reverse: the L2 cache may still hold the latest.
// All heads of a packed sequence are complete at about the same time, before the next sequence.
__device__ inline int dq_tile(const Params& p, int tiles, int n) {
    if (const int heads = int(p.Hq); PACKED) return n % heads * tiles + n / heads;
    const i64 splits = p.head_splits * p.query_splits, last_splits = p.B * p.Hkv * splits / p.head_groups;
    const int last = int((last_splits + splits - 1) / splits * p.group) * tiles;
    const int others = int(p.B * p.Hq) * tiles - last;
    return n < others ? others - 1 - n : n;
}
