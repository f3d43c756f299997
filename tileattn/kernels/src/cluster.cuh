// Layer 1. A cluster of two CTAs: each stores to the shared memory of the other.
#pragma once

#include "copy.cuh"

#if KEY_PAIR
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif

// Which of the two this CTA is.
__device__ inline u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Where the other CTA has what is at this address here.
__device__ inline u32 peer_address(u32 address) {
    u32 peer;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(peer)
        : "r"(address), "r"(cluster_rank() ^ 1));
    return peer;
}

__device__ inline void store_peer(u32 address, float x, float y) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y)
                 : "memory");
}
__device__ inline void store_peer(u32 address, double x, double y) {
    asm volatile("st.shared::cluster.v2.f64 [%0], {%1, %2};" ::"r"(address), "d"(x), "d"(y)
                 : "memory");
}

// All threads of both CTAs arrive, and wait for all others to have arrived, in turn. What they have
// stored before they arrive is there after the wait.
__device__ inline void arrive_at_peer() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void wait_for_peer() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
