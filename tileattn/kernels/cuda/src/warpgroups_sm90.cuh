// Layer 3. The warpgroups of Hopper's kernels: consumer warpgroups, and one producer warpgroup.
#pragma once

#include "config.cuh"
#include "ptxas.cuh"
#include "tma_sm90.cuh"

constexpr int WARPGROUP = 4 * WARP;  // threads
constexpr int WARPGROUP_ROWS = 64;   // rows of a wgmma
constexpr int CONSUMERS = WARPS_M * WARPS_N / 4;  // consumer warpgroups of a group
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;
constexpr int WARPGROUPS = GROUPS * CONSUMERS;  // consumer warpgroups of the CTA
static_assert(PRODUCER_WARPS == 4 || SPLIT_KV, "setmaxnreg takes a whole warpgroup");

// Registers of a thread, in units of 8 (setmaxnreg). The producer warpgroup keeps what it needs, which is
// more if it has half of the columns, and gives the rest to the consumers.
constexpr int ALL_REGISTERS =
    65536 / WARPGROUP / MIN_BLOCKS_PER_SM / (WARPGROUPS + 1) / 8 * 8 * (WARPGROUPS + 1);
template <int NEEDED>
struct Registers {
    static constexpr int CONSUMER = (ALL_REGISTERS - NEEDED) / WARPGROUPS / 8 * 8;
    static constexpr int PRODUCER = ALL_REGISTERS - WARPGROUPS * CONSUMER;
};
constexpr int CONSUMER_REGISTERS = Registers<PAIR ? 40 : 24>::CONSUMER;
constexpr int PRODUCER_REGISTERS = Registers<PAIR ? 40 : 24>::PRODUCER;

// The tensor maps of a launch, in the order in which the host passes them.
struct ForwardMaps {
    TensorMap q, k, v;
};
struct BackwardMaps {
    TensorMap q, k, v, dout;
};

// The index of this thread's warpgroup. With one group the producer warpgroup is number CONSUMERS.
__device__ inline int warpgroup_index() { return uniform(threadIdx.x / WARPGROUP); }

// Wait for all threads of one consumer warpgroup, or of all consumer warpgroups.
__device__ inline void sync_warpgroup(int warpgroup) {
    named_barrier_sync<WARPGROUP>(barrier_id(NamedBarrier::WARPGROUP, warpgroup));
}
__device__ inline void sync_consumers() { named_barrier_sync<CONSUMER_THREADS>(CONSUMER_BARRIER); }
