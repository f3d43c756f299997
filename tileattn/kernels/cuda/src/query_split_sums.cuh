// Layer 3. dK and dV of a key block, joined over the splits of its queries in a binary tree. Of two splits, or
// of two subtrees, the first to finish leaves its sums in memory, and the second adds them to its own: a + b
// is b + a, so the result does not depend on which one is first. The tree depends only on the number of
// splits.
#pragma once

#include "query_split.cuh"
#include "tma_sm90.cuh"

// Values of a semaphore: the first split has claimed the place, and has stored its sums.
constexpr u32 SPLIT_CLAIMED = 1, SPLIT_STORED = 2;

// The room for the sums of a split, in elements. As in scheduler.py.
constexpr i64 SPLIT_SUMS = i64(BLOCK_K) * 2 * (HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM);

// Four sums, an atom of a lane.
struct alignas(16) FourSums {
    Accum x[4];
};

// Threads that join their sums together: a team is a warp or a CTA. `index` is its index among TEAMS, and
// any(x) is true if x holds for one of its threads; it orders memory like a barrier.
template <int TEAMS, class Any>
struct SplitTeam {
    static constexpr int THREADS_OF_TEAM = THREADS / TEAMS;
    static constexpr i64 SUMS = SPLIT_SUMS / TEAMS;
    const Params& p;
    i64 block;  // index among the key blocks of all key heads
    int split, index, thread;
    Any any;

    // Call visit(four sums, address) for all atoms of a thread.
    template <int MT, int NT, class Visit>
    __device__ void for_each(FourSums*& place, Fragment<Accum, MT, NT>& sums, Visit visit) const {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int n = 0; n < NT; ++n, place += THREADS_OF_TEAM) visit(sums.x[m][n], place);
            __syncwarp();  // otherwise all loads of a thread come first, and need registers
        }
    }

    // Join the sums of all splits. Returns true in the last team, which has them all then.
    template <class... Sums>
    __device__ bool join(Sums&... sums) const {
        static_assert(THREADS_OF_TEAM * (sizeof(Sums) + ...) <= SUMS * sizeof(Accum), "as much room");
        const int splits = split_count(p);
#pragma unroll 1
        for (int half = 1; half < splits; half *= 2) {
            // The first split of the second half of a subtree is the number of its root.
            const int root = (split & -2 * half) + half;
            if (root >= splits) continue;  // the subtree has no second half
            const i64 at = (block * (splits - 1) + root - 1) * TEAMS + index;
            u32* const semaphore = p.split_semaphores + at;
            FourSums* place = static_cast<FourSums*>(p.split_sums) + at * SUMS / 4 + thread;
            bool second = false;
            if (thread == 0 && claim_semaphore(semaphore, SPLIT_CLAIMED)) {
                // The first team is about to store, and waits for no other.
                while (read_semaphore(semaphore) != SPLIT_STORED) {}
                second = true;
            }
            if (!any(second)) {
                (for_each(place, sums, [](const Accum(&x)[4], FourSums* there) {
                    *there = {x[0], x[1], x[2], x[3]};
                }), ...);
                any(false);  // all threads have stored
                if (thread == 0) add_to_semaphore(semaphore, SPLIT_STORED - SPLIT_CLAIMED);
                return false;
            }
            (for_each(place, sums, [](Accum(&x)[4], const FourSums* there) {
                const FourSums other = *there;
#pragma unroll
                for (int e = 0; e < 4; ++e) x[e] += other.x[e];
            }), ...);
        }
        return true;
    }
};
template <int TEAMS, class Any>
__device__ SplitTeam<TEAMS, Any> split_team(const Params& p, i64 block, int split, int index,
                                           int thread, Any any) {
    return {p, block, split, index, thread, any};
}
