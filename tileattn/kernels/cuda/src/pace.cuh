// Layer 3. Persistent CTAs keep pace, so that they share what is in the L2 cache.
#pragma once

#include "tile_scheduler_sm90.cuh"

// CTAs that are at about the same keys, or backward the same queries, read them from memory once. Over
// a long head they drift apart. So each group counts itself every PACE_TILES tiles, and waits for those
// that are more than PACE_LAG steps behind. Counter 0 has those that have ended. Not all CTAs need be
// running: one that has waited for long counts as ended, and waits no more.
constexpr int PACE_TILES = 32, PACE_LAG = 12, PATIENCE = 1000;  // the last in polls

struct Pace {
    int tiles = 0;  // below 0 once it waits no more

    __device__ void advance(const Params& p) {
        const u32 step = u32(++tiles) / PACE_TILES;
        if (tiles % PACE_TILES || step >= p.pace_steps) return;
        atomicAdd(p.paces + step, 1);
        if (step <= PACE_LAG) return;
        const volatile u32 *const ended = p.paces, *const behind = ended + step - PACE_LAG;
        for (int n = 0; *behind + *ended < worker_count(); ++n) {
            if (n == PATIENCE) {
                end(p);
                tiles = -(1 << 30);
                return;
            }
            __nanosleep(200);
        }
    }
    __device__ void end(const Params& p) const {
        if (p.pace_steps && tiles >= 0) atomicAdd(p.paces, 1);
    }
};
