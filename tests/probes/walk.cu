// Probe of walk_sm90.cuh: what each block of threads of the backward pass does in its turns.
#include "walk_sm90.cuh"

// out: (turns, blocks of threads, 7), left as it is behind the last work of a block.
extern "C" __global__ void walks(Params p, const int* schedule, i64 turns, int* out) {
    p.schedule = schedule;
    Work work{};
    for (int turn = 0; turn < turns && find_work(p, turn, work); ++turn) {
        int* to = out + (i64(turn) * gridDim.x + blockIdx.x) * 7;
        const Tiles& tiles = work.tiles;
        for (int field : {work.b, work.kv, work.k0, tiles.first, tiles.past, tiles.full,
                          tiles.full_past})
            *to++ = field;
    }
}
