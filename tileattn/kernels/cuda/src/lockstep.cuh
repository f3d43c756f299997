// Layer 3. Lockstep of persistent CTAs, so that they share keys or queries in the L2 cache.
#pragma once

#include "tile_scheduler_sm90.cuh"

// CTAs that read the same keys (backward: queries) at about the same time read them from device memory
// once. Over a long head CTAs drift apart. So each group increments a counter every LOCKSTEP_TILES tiles,
// and waits for groups that are more than LOCKSTEP_LAG steps late. Counter 0 counts the groups that have
// ended. CTAs need not all be resident: after PATIENCE polls a group counts itself as ended, and never
// waits again.
constexpr int LOCKSTEP_TILES = 32, LOCKSTEP_LAG = 12, PATIENCE = 1000;

struct Lockstep {
    int tiles = 0;  // negative after it has given up waiting

    __device__ void advance(const Params& p) {
        const u32 step = u32(++tiles) / LOCKSTEP_TILES;
        if (tiles % LOCKSTEP_TILES || step >= p.lockstep_steps) return;
        atomicAdd(p.lockstep_counters + step, 1);
        if (step <= LOCKSTEP_LAG) return;
        const volatile u32 *const ended = p.lockstep_counters, *const lagging = ended + step - LOCKSTEP_LAG;
        for (int n = 0; *lagging + *ended < worker_count(); ++n) {
            if (n == PATIENCE) {
                end(p);
                tiles = -(1 << 30);
                return;
            }
            __nanosleep(200);
        }
    }
    __device__ void end(const Params& p) const {
        if (p.lockstep_steps && tiles >= 0) atomicAdd(p.lockstep_counters, 1);
    }
};
