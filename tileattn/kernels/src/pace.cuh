// Layer 3. Persistent CTAs keep pace, so that they share what is in the L2 cache.
#pragma once

#include "params.cuh"

// Under a causal mask work tiles begin at any time, and CTAs drift apart. They read keys from the L2
// cache, and not from memory, while all are at about the same ones. So where the keys of a head exceed
// the cache, each counts itself every PACE_TILES key tiles, and waits for those that are more than
// PACE_LAG steps behind. Not all CTAs need be running: one that has waited for long waits no more.
constexpr int PACE_TILES = 32, PACE_LAG = 12, PATIENCE = 1000;  // the last in polls

struct Pace {
    int tiles = 0;
    bool waits = true;

    __device__ void advance(const Params& p) {
        const int step = ++tiles / PACE_TILES;
        if (tiles % PACE_TILES || step >= p.pace_steps) return;
        atomicAdd(p.paces + step, 1);
        if (!waits || step <= PACE_LAG) return;
        const volatile u32* const behind = p.paces + step - PACE_LAG;
        for (int n = 0; *behind < gridDim.x; ++n) {
            if (n == PATIENCE) {
                waits = false;
                return;
            }
            __nanosleep(200);
        }
    }
};
