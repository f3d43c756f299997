// Probe of walk_sm90.cuh: the works of the backward pass, as blocks of threads claim them, and where
// tiles lie.
#include "walk_sm90.cuh"

extern "C" __global__ void places(u32* out) {
    extern __shared__ __align__(1024) char tiles[];
    __shared__ Shared shared;
    u32 start = shared_address(tiles);
    asm volatile("" : "+r"(start));  // so that the compiler does not rely on its alignment
    const Memory memory{start, shared};
    *out++ = start, *out++ = memory.k().address, *out++ = memory.v().address;
    for (int s = 0; s < Q_STAGES; ++s) *out++ = memory.q(s).address;
    for (int s = 0; s < OUT_STAGES; ++s) *out++ = memory.dout(s).address;
    for (int s = 0; s < PAIR_STAGES; ++s) *out++ = memory.ds(s).address;
    for (int n = 0; n < ADDERS; ++n)
        for (int s = 0; s < SUM_STAGES; ++s) *out++ = memory.sums(n, s);
    if (IS_WIDE) *out++ = memory.weights();
}

// out: (works, 7), of each by its index. One lane of each block claims.
extern "C" __global__ void walks(Params p, u32* claimed, int* out) {
    if (threadIdx.x) return;
    p.claimed = claimed;
    Work work{};
    for (u32 index; index = claim(p), find_work(p, index, work);) {
        int* to = out + i64(index) * 7;
        const Tiles& tiles = work.tiles;
        for (int field : {work.b, work.kv, work.k0, tiles.first, tiles.past, tiles.full,
                          tiles.full_past})
            *to++ = field;
    }
}
