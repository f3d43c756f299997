// Probe of work_sm90.cuh: what each block of threads does in its turns, and where its tiles lie.
#include "work_sm90.cuh"

extern "C" __global__ void places(u32* out) {
    extern __shared__ __align__(1024) char tiles[];
    __shared__ Shared shared;
    u32 start = shared_address(tiles);
    asm volatile("" : "+r"(start));  // so that the compiler does not rely on its alignment
    const Memory memory{start, shared};
    *out++ = start;
    for (int s = 0; s < Q_STAGES; ++s) *out++ = memory.q(s).address;
    for (int s = 0; s < STAGES; ++s) *out++ = memory.k(s).address, *out++ = memory.v(s).address;
}

// out: (turns, blocks of threads, 6 + 4 GROUPS), left as it is behind the last work of a block.
extern "C" __global__ void works(Params p, const int* schedule, i64 turns, int* out) {
    p.schedule = schedule;
    Work work{};
    for (int turn = 0; turn < turns && find_work(p, turn, work); ++turn) {
        int* to = out + (i64(turn) * gridDim.x + blockIdx.x) * (6 + 4 * GROUPS);
        for (int field : {work.b, work.h, work.q0, work.first, work.past, work.turn}) *to++ = field;
        for (int row = 0; row < BLOCK_Q; row += GROUP_ROWS) {
            const Tiles tiles = tiles_of(p, work.b, work.q0 + row, GROUP_ROWS);
            for (int field : {tiles.first, tiles.past, tiles.full, tiles.full_past}) *to++ = field;
        }
    }
}
