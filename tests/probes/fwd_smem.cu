// Probe of fwd_smem_sm90.cuh and tile_scheduler_sm90.cuh: the work tiles of each worker in the forward
// pass, and where the tensors lie in shared memory.
#include "fwd_smem_sm90.cuh"

extern "C" __global__ void addresses(u32* out) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage[GROUPS];
    char* start = tensors;
    asm volatile("" : "+l"(start));  // so that the compiler does not rely on its alignment
    *out++ = shared_address(start);
    for (int group = 0; group < GROUPS; ++group) {
        const Smem smem(start, storage, group);
        for (int s = 0; s < Q_STAGES; ++s) *out++ = smem.q(s).address;
        for (int s = 0; s < STAGES; ++s) *out++ = smem.k(s).address, *out++ = smem.v(s).address;
    }
}

// out: (iterations, workers, 6 + 5 CONSUMERS), left as it is behind the last work tile of a worker.
extern "C" __global__ void forward_work_tiles(Params p, const int* assignment, i64 iterations,
                                              int* out) {
    p.assignment = assignment;
    for (int group = 0; group < GROUPS; ++group) {
        WorkTile work{};
        WorkOrder<> order(p, group);
        for (int n = 0; n < iterations && get_work(p, order, work); ++n) {
            int* to = out + (i64(n) * worker_count() + worker_of(group)) * (6 + 5 * CONSUMERS);
            for (int field : {work.b, work.h, work.q0, work.begin, work.end, work.iteration})
                *to++ = field;
            for (int row = 0; row < BLOCK_Q; row += WARPGROUP_ROWS) {
                const TileRange tiles = key_tiles(p, work, work.window, work.q0 + row, WARPGROUP_ROWS);
                for (int field : {tiles.begin, tiles.end, tiles.full_begin, tiles.full_end,
                                  int(tiles.ends_in_half)})
                    *to++ = field;
            }
        }
    }
}
