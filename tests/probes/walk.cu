// Probe of walk_sm90.cuh: the works of the backward pass, as blocks of threads claim them.
#include "walk_sm90.cuh"

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
