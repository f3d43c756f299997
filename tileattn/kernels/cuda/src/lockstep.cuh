// Layer 3. Persistent CTAs keep pace, so that they share what is in the L2 cache.
#pragma once

#include "tile_scheduler_sm90.cuh"

// CTAs that are at about the same keys, or backward the same queries, read them from memory once. Over
// a long head they drift apart. So each group counts itself every LOCKSTEP_TILES tiles, and waits for those
// that are more than LOCKSTEP_LAG steps behind. Counter 0 has those that have ended. Not all CTAs need be
// running: one that has waited for long counts as ended, and waits no more.
constexpr int LOCKSTEP_TILES = 32, LOCKSTEP_LAG = 12, PATIENCE = 1000;  // the last in polls

struct Lockstep {
    int tiles = 0;  // below 0 once it waits no more

    __device__ void advance(const Params& p) {
        const u32 step = u32(++tiles) / LOCKSTEP_TILES;
        if (tiles % LOCKSTEP_TILES || step >= p.lockstep_steps) return;
        atomicAdd(p.lockstep_counters + step, 1);
        if (step <= LOCKSTEP_LAG) return;
        const volatile u32 *const ended = p.lockstep_counters, *const behind = ended + step - LOCKSTEP_LAG;
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
        if (p.lockstep_steps && tiles >= 0) atomicAdd(p.lockstep_counters, 1);
    }
};
