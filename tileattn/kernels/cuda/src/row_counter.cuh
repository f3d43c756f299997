// Layer 3. Which heads the statistics of rows are complete of, while backward_preprocess runs: Hopper's
// backward kernels begin beside it. Of packed sequences nobody counts.
#pragma once

#include "sequence.cuh"
#include "tma_sm90.cuh"

// By all lanes of a warp, which has stored so many rows. `head` counts key heads of all batch entries.
__device__ inline void count_rows(const Params& p, i64 head, int rows) {
    __syncwarp();
    if (!PACKED && p.row_counter && threadIdx.x % WARP == 0)
        add_to_semaphore(p.row_counter + head, u32(rows));
}

// Wait for the rows of all query heads of a key head. What this thread loads then, by TMA, too, is
// there. All CTAs that count are running: this kernel starts when they do.
__device__ inline void wait_for_rows(const Params& p, i64 head) {
    if constexpr (!PACKED && !ONLY_FLAGGED) {
        while (read_semaphore(p.row_counter + head) != u32(p.group * p.rows)) {}
        fence_async_global();
    }
}
