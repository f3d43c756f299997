// Probe of fwd_smem_sm90.cuh and tile_scheduler_sm90.cuh: the work tiles of each CTA in the forward
// pass, and where the tensors lie in shared memory.
#include "fwd_smem_sm90.cuh"

extern "C" __global__ void addresses(u32* out) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage;
    u32 start = shared_address(tensors);
    asm volatile("" : "+r"(start));  // so that the compiler does not rely on its alignment
    const Smem smem{nullptr, start, storage};
    *out++ = start;
    for (int s = 0; s < Q_STAGES; ++s) *out++ = smem.q(s).address;
    for (int s = 0; s < STAGES; ++s) *out++ = smem.k(s).address, *out++ = smem.v(s).address;
}

// out: (iterations, CTAs, 6 + 5 CONSUMERS), left as it is behind the last work tile of a CTA.
extern "C" __global__ void forward_work_tiles(Params p, const int* schedule, i64 iterations,
                                              int* out) {
    p.schedule = schedule;
    WorkTile work{};
    WorkOrder<> order(p);
    for (int n = 0; n < iterations && get_work(p, order, work); ++n) {
        int* to = out + (i64(n) * gridDim.x + blockIdx.x) * (6 + 5 * CONSUMERS);
        for (int field : {work.b, work.h, work.q0, work.begin, work.end, work.iteration})
            *to++ = field;
        for (int row = 0; row < BLOCK_Q; row += WARPGROUP_ROWS) {
            const TileRange tiles = key_tiles(p, work, work.q0 + row, WARPGROUP_ROWS);
            for (int field : {tiles.begin, tiles.end, tiles.full_begin, tiles.full_end,
                              int(tiles.ends_in_half)})
                *to++ = field;
        }
    }
}
