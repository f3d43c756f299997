// Layer 1. A cluster of two CTAs: each stores to the shared memory of the other.
#pragma once

#include "copy.cuh"

#if KEY_PAIR
#define CLUSTER __cluster_dims__(2, 1, 1)
#else
#define CLUSTER
#endif

// The number of this CTA in its cluster, 0 or 1.
__device__ inline u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The address as a matrix descriptor holds it. In a cluster a shared address has the number of its CTA above
// these bits, where descriptors have the offset between slices.
__device__ inline u32 address_in_cta(u32 address) {
#if KEY_PAIR
    return address & 0x3FFFF;
#else
    return address;
#endif
}

// The address in the other CTA that corresponds to this one.
__device__ inline u32 peer_address(u32 address) {
    u32 peer;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(peer)
        : "r"(address), "r"(cluster_rank() ^ 1));
    return peer;
}

// Start to store 4, 8 or 16 bytes to the other CTA, whose mbarrier counts the bytes that have landed.
__device__ inline void send_peer(u32 address, u32 barrier, double x, double y) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%1, %2}, [%3];" ::
            "r"(address),
        "d"(x), "d"(y), "r"(barrier)
        : "memory");
}
__device__ inline void send_peer(u32 address, u32 barrier, const float (&x)[4]) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
        : "memory");
}
__device__ inline void send_peer(u32 address, u32 barrier, u32 x) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
            address),
        "r"(x), "r"(barrier)
        : "memory");
}
__device__ inline void send_peer(u32 address, u32 barrier, float x, float y) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
            "r"(address),
        "f"(x), "f"(y), "r"(barrier)
        : "memory");
}
__device__ inline void send_peer(u32 address, u32 barrier, const u32 (&x)[4]) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
        : "memory");
}
// Arrive on an mbarrier of the other CTA. With `.release.cluster` the thread would first wait for its
// adds to device memory.
__device__ inline void arrive_at_peer(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void store_peer(u32 address, u32 x) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// A cluster barrier: all threads of both CTAs arrive, then wait. Stores before the arrive are visible after
// the wait, so the arrive also waits for adds to device memory.
__device__ inline void arrive_at_peer() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void wait_for_peer() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}
