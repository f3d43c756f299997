// Layer 1. Hopper's TMA loads, bulk copies, mbarriers, pipeline states, fences, named barriers and
// setmaxnreg.
#pragma once

#include "copy.cuh"

// A tensor map, opaque: written on the host by cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
    char bytes[128];
};

// Fetch the map before the first TMA load needs it.
__device__ inline void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The start of a CTA: one thread initialises the barriers in shared memory, another prefetches the maps.
template <class Smem, class... Maps>
__device__ inline void set_up(const Smem& smem, const Maps&... maps) {
    if (threadIdx.x == 0) smem.init();
    if (threadIdx.x == WARP) (prefetch_tensormap(maps), ...);
}

// Fault injection for tools/stress_gpu.py: random stalls at arrives and waits, and pairs of loads
// issued in the opposite order. Off in kernels that serve calls.
#if defined(TROUBLE_STALLS)
constexpr bool STALLS = true;
#else
constexpr bool STALLS = false;
#endif
#if defined(TROUBLE_SWAPPED_COPIES)
#define BOTH_LOADS(a, b) b, a
#else
#define BOTH_LOADS(a, b) a, b
#endif

__device__ inline void stall() {
    if constexpr (STALLS) {
        u32 clock, processor;
        asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
        asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
        const u32 mixed = (clock ^ processor * 0x9E3779B9u) * 0x85EBCA6Bu, chance = mixed >> 16;
        // One in 16, for up to two microseconds. No branch: the warp must not diverge.
        asm volatile("nanosleep.u32 %0;" ::"r"(chance % 16 ? 0u : chance >> 5) : "memory");
    }
}

// True in the first thread of a warp. The election tells the compiler that a single thread runs the branch.
// Otherwise it would repeat each TMA load for every thread that might be active.
__device__ inline bool is_first_lane() {
    u32 elected = 0;
    if (threadIdx.x % WARP == 0)
        asm volatile("{.reg .pred p; elect.sync _|p, 1; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
    return elected;
}

// An mbarrier: a phase ends when all expected threads have arrived and all expected bytes have
// landed.
struct Barrier {
    u32 address;

    __device__ void init(int arrivals) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals));
    }
    __device__ void arrive() const {
        stall();
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
    }
    // Arrive once all copies that this thread has started have landed (copy_async).
    __device__ void arrive_after_copies() const {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address)
                     : "memory");
    }
    // Arrive, and add bytes of loads that the phase waits for.
    __device__ void arrive_and_expect_tx(int bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address),
                     "r"(bytes)
                     : "memory");
    }
    // Wait for the phase of this parity to end. The phase before the first has parity 1, so a
    // producer passes its first wait on an empty barrier.
    __device__ void wait(u32 parity) const {
        asm volatile(
            "{.reg .pred done; again: "
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; "
            "@!done bra again;}" ::"r"(address),
            "r"(parity)
            : "memory");
        stall();
    }
};

// The position of a thread in a circular buffer of stages: the stage, and the parity of its barriers'
// phase.
template <int STAGES>
struct PipelineState {
    int stage = 0;
    u32 phase = 0;

    __device__ void advance(int by = 1) {
        stage += by;
        if (stage >= STAGES) stage -= STAGES, phase ^= 1;
    }
    __device__ PipelineState next() const {
        PipelineState state = *this;
        state.advance();
        return state;
    }
};

// Initialised mbarriers become visible to TMA.
__device__ inline void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Start a TMA load of the box at (column, row, head, batch). Elements outside the tensor become
// zero. With ONCE the L2 cache evicts the data first: a call reads it once.
template <bool ONCE = false>
__device__ inline void tma_load(u32 target, const TensorMap& map, int column, int row, int head,
                                int batch, const Barrier& done) {
    constexpr u64 EVICT_FIRST = 0x12f0000000000000;  // what createpolicy.fractional.L2::evict_first returns
    if constexpr (ONCE) {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(target),
            "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(done.address), "l"(EVICT_FIRST)
            : "memory");
        return;
    }
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(done.address)
        : "memory");
}
// Prefetch a box into the L2 cache.
__device__ inline void tma_prefetch(const TensorMap& map, int column, int row, int head,
                                    int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map),
                 "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// Start a bulk copy from global to shared memory. Addresses and bytes are multiples of 16.
__device__ inline void bulk_load(u32 target, const void* source, int bytes, const Barrier& done) {
    done.arrive_and_expect_tx(bytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(target),
        "l"(source), "r"(bytes), "r"(done.address)
        : "memory");
}

// Start a bulk store of floats from shared to global memory, or with `adds` a bulk reduce-add. The
// issuing thread waits until its source has been read, or until all of it is complete.
__device__ inline void bulk_store(float* target, u32 source, int bytes, bool adds) {
    if (adds)
        asm volatile(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                target),
            "r"(source), "r"(bytes)
            : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                     "r"(source), "r"(bytes)
                     : "memory");
}
// Make the copies that the thread has started since the last call a group, which may be empty.
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Wait until all groups except the last UNREAD have read their shared memory.
template <int UNREAD>
__device__ inline void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(UNREAD) : "memory");
}
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// A semaphore in global memory orders the bulk stores of different CTAs. They go through the async proxy,
// so both sides need a proxy fence. Publish: bulk stores that this thread has waited for become visible
// before the value does. The wait alone makes them visible only to the waiting thread: with a relaxed store
// an H100 gave wrong sums (docs/tuning-log.md).
__device__ inline void publish_semaphore(u32* place, u32 value) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}
// Wait: bulk stores after a read that returns the value, and after `fence_async_global`, are ordered after
// the publisher's bulk stores.
__device__ inline u32 read_semaphore(const u32* place) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}
// Claim a semaphore whose value is 0. Returns its previous value.
__device__ inline u32 claim_semaphore(u32* place, u32 value) {
    u32 before;
    asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], 0, %2;"
                 : "=r"(before)
                 : "l"(place), "r"(value)
                 : "memory");
    return before;
}
// Add to a semaphore. A thread that reads the sum sees all bulk stores that the adding threads have waited
// for. Generic loads of that data need no proxy fence: the completion of a bulk store includes one.
__device__ inline void add_to_semaphore(u32* place, u32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}
__device__ inline void fence_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// After this fence and a barrier, generic writes to shared memory are visible to TMA and wgmma.
__device__ inline void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Store four 8 x 8 matrices of 16-bit elements. Lane i passes the address of row i % 8 of matrix i / 8.
__device__ inline void store_matrices(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Copy 16 bytes from shared to global memory if `wanted`.
__device__ inline void store_chunk(void* target, u32 source, bool wanted) {
    asm volatile(
        "{.reg .pred wanted; .reg .b32 x, y, z, w; setp.ne.b32 wanted, %2, 0; "
        "ld.shared.v4.b32 {x, y, z, w}, [%1]; "
        "@wanted st.global.v4.b32 [%0], {x, y, z, w};}" ::"l"(target),
        "r"(source), "r"(int(wanted))
        : "memory");
}

// Named barrier: wait for THREADS arrivals. It counts whole warps, so each converges first.
// Warpgroups may arrive from different places in the code.
template <int THREADS>
__device__ inline void named_barrier_sync(int id) {
    __syncwarp();
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// Arrive on a named barrier without waiting.
template <int THREADS>
__device__ inline void named_barrier_arrive(int id) {
    __syncwarp();
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// Wait for a named barrier; returns true if the condition holds for any thread. All threads arrive from the
// same place in the code.
template <int THREADS>
__device__ inline bool named_barrier_or(int id, bool holds) {
    u32 any;
    __syncwarp();
    asm volatile(
        "{.reg .pred holds, any; setp.ne.b32 holds, %2, 0; "
        "barrier.cta.red.or.aligned.pred any, %1, %3, holds; selp.b32 %0, 1, 0, any;}"
        : "=r"(any)
        : "r"(id), "r"(u32(holds)), "n"(THREADS)
        : "memory");
    return any;
}

// setmaxnreg: the warpgroup gives registers back, or takes those that others gave back.
template <int REGISTERS>
__device__ inline void reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
