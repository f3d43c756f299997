// Layer 3. Flags of heads, by which the kernels of the backward pass share the work.
#pragma once

#include "sequence.cuh"

// Flags of a key head of one sequence, which the backward pass sets: something is not finite, or
// scores are so large that the logsumexp is too coarse. Hopper's kernels skip heads whose flags are
// known, and leave heads that FAILED to others. Counterparts are in context.py.
constexpr u32 NON_FINITE = 1, LARGE_SCORES = 2, KNOWN = NON_FINITE | LARGE_SCORES, FAILED = 4;
__device__ inline u32& head_flags(const Params& p, i64 b, i64 kv) {
    return p.head_flags[b * p.Hkv + kv];
}

// Whether any head has a flag that this kernel takes; mostly none has. All threads call.
__device__ inline bool any_flagged_head(const Params& p) {
    bool any = false;
    for (i64 i = threadIdx.x; i < p.entries * p.Hkv; i += blockDim.x) {
        any = any || p.head_flags[i] & FLAGGED_HEADS;
    }
    return __syncthreads_or(any);
}

// Call run(block) for all blocks: one for each CTA, or of flagged heads, many for each of a few
// CTAs.
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
