// Probe of bwd_smem_sm90.cuh and tile_scheduler_sm90.cuh: the work tiles of the backward pass as
// CTAs claim them, and where the tensors lie in shared memory.
#include "bwd_smem_sm90.cuh"

extern "C" __global__ void addresses(u32* out) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage;
    u32 start = shared_address(tensors);
    asm volatile("" : "+r"(start));  // so that the compiler does not rely on its alignment
    const Smem smem{nullptr, start, storage};
    *out++ = start, *out++ = smem.k().address, *out++ = smem.v().address;
    for (int s = 0; s < Q_STAGES; ++s) *out++ = smem.q(s).address;
    for (int s = 0; s < DOUT_STAGES; ++s) *out++ = smem.dout(s).address;
    if constexpr (IS_WIDE) {
        for (int s = 0; s < P_STAGES; ++s) *out++ = smem.p(s);
    } else {
        for (int s = 0; s < DS_STAGES; ++s) *out++ = smem.ds(s).address;
        for (int n = 0; n < CONSUMERS; ++n)
            for (int s = 0; s < DQ_STAGES; ++s) *out++ = smem.dq(n, s);
    }
}

// out: (work tiles, 7), by index. One lane of each CTA claims.
extern "C" __global__ void backward_work_tiles(Params p, u32* tile_counter, int* out) {
    if (threadIdx.x) return;
    p.tile_counter = tile_counter;
    WorkTile work{};
    for (u32 index; index = claim_work(p), get_work(p, index, work);) {
        int* to = out + i64(index) * 7;
        const QueryTiles& tiles = work.tiles;
        for (int field :
             {work.b, work.kv, work.k0, tiles.first, tiles.stop, tiles.full.lo, tiles.full.hi})
            *to++ = field;
    }
}
