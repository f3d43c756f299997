// Layer 3. Counters that tell for which heads backward_preprocess has written lse_log2 and delta. Hopper's
// backward kernels start while it still runs. Packed sequences have no counters, and the kernels of split float32
// need none: they start after the kernels that split rows.
#pragma once

#include "sequence.cuh"
#include "tma_sm90.cuh"

// All lanes of a warp call this when the warp has stored `rows` rows. `head` is the index among the key
// heads of all batch entries.
__device__ inline void count_rows(const Params& p, i64 head, int rows) {
    __syncwarp();
    if (!PACKED && p.row_counter && threadIdx.x % WARP == 0)
        add_to_semaphore(p.row_counter + head, u32(rows));
}

// Wait for the rows of all query heads of a key head. Later loads of this thread, TMA loads included, see
// them. There is no deadlock: this kernel starts only when all CTAs that count are running.
__device__ inline void wait_for_rows(const Params& p, i64 head) {
    if constexpr (!PACKED && !ONLY_FLAGGED && !SPLIT_FLOATS) {
        while (read_semaphore(p.row_counter + head) != u32(p.group * p.rows)) {}
        fence_async_global();
    }
}
