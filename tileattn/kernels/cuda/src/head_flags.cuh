// Layer 3. Flags of heads, which divide the heads among the kernels of a pass.
#pragma once

#include "sequence.cuh"

// Flags of a key head of one sequence, in the backward pass. backward_preprocess sets NON_FINITE if lse or delta of
// a row is not finite, and LARGE_SCORES if scores are so large that the logsumexp is too coarse. Generic kernels also
// set NON_FINITE if dQ is not finite. Hopper's kernels, kernels of split float32 and paired CTAs skip flagged heads,
// and set FAILED if a gradient is not finite: then generic kernels compute the head. The same flags are in context.py.
//
// In the forward pass of split float32 a query head has flags, so that its bits do not depend on others.
constexpr u32 NON_FINITE = 1, LARGE_SCORES = 2, KNOWN = NON_FINITE | LARGE_SCORES, FAILED = 4;

// Two words before them hold the flags of all heads together: KNOWN ones, and FAILED, which is stored without
// atomics. So a kernel that computes flagged heads reads two words to find that there are none.
__device__ inline u32& head_flags(const Params& p, i64 b, i64 kv) {
    return p.head_flags[2 + b * p.Hkv + kv];
}
__device__ inline u32& query_head_flags(const Params& p, i64 b, i64 h) {
    return p.head_flags[2 + b * p.Hq + h];
}
__device__ inline bool any_flagged_head(const Params& p) {
    return (p.head_flags[0] | p.head_flags[1]) & FLAGGED_HEADS;
}

// Flag a head. Only new flags take atomics: atomics of all rows would contend.
__device__ inline void flag_head(const Params& p, i64 b, i64 kv, u32 flags) {
    u32& known = head_flags(p, b, kv);
    if (!(flags & ~*static_cast<volatile u32*>(&known))) return;
    atomicOr(&known, flags);
    atomicOr(p.head_flags, flags);
}
// Flag a head as FAILED. Its other flags are final, so threads that do so at a time store the same numbers.
__device__ inline void fail(const Params& p, u32& flags) {
    flags |= FAILED;
    p.head_flags[1] = FAILED;
}
__device__ inline void fail_head(const Params& p, i64 b, i64 kv) { fail(p, head_flags(p, b, kv)); }
__device__ inline void fail_query_head(const Params& p, i64 b, i64 h) { fail(p, query_head_flags(p, b, h)); }

// Call run(block) for the blocks of this CTA: one block, or with ONLY_FLAGGED, which launches few CTAs,
// many.
template <class Run>
__device__ inline void for_blocks(const Params& p, i64 blocks, Run run) {
    static_assert(!(PAIR && ONLY_FLAGGED), "pairs leave flagged heads to others");
    if constexpr (!ONLY_FLAGGED) {
        run(work_index());
    } else {
        if (!any_flagged_head(p)) return;
#pragma unroll 1
        for (i64 i = blockIdx.x; i < blocks; i += gridDim.x) {
            run(int(i));
            __syncthreads();  // all warps are done with shared memory
        }
    }
}
