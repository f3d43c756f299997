// Layer 3. Persistent CTAs keep pace, so that they share what is in the L2 cache.
#pragma once

#include "tile_scheduler_sm90.cuh"

// CTAs that are at about the same keys read them from memory once. Under a causal mask they drift
// apart. So each group counts itself every PACE_TILES key tiles, and waits for those that are more
// than PACE_LAG steps behind. Counter 0 has those that have ended. Not all CTAs need be running: one that
// has waited for long waits no more.
constexpr int PACE_TILES = 32, PACE_LAG = 12, PATIENCE = 1000;  // the last in polls

struct Pace {
    int tiles = 0;
    bool waits = true;

    __device__ void advance(const Params& p) {
        const int step = ++tiles / PACE_TILES;
        if (tiles % PACE_TILES || step >= p.pace_steps) return;
        atomicAdd(p.paces + step, 1);
        if (!waits || step <= PACE_LAG) return;
        const volatile u32 *const ended = p.paces, *const behind = ended + step - PACE_LAG;
        for (int n = 0; *behind + *ended < worker_count(); ++n) {
            if (n == PATIENCE) {
                waits = false;
                return;
            }
            __nanosleep(200);
        }
    }
    __device__ void end(const Params& p) const {
        if (p.pace_steps) atomicAdd(p.paces, 1);
    }
};
