// Layer 1. Hopper's copies of boxes of a tensor, the barriers that they complete on, and how warps
// hand each other shared memory and registers.
#pragma once

#include "copy.cuh"

// A tensor map of the driver, opaque: what cuTensorMapEncodeTiled has written.
struct alignas(64) TensorMap {
    char bytes[128];
};

// Let the copy engine have the map before the first copy needs it.
__device__ inline void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// For tools/stress_gpu.py: where threads meet some sleep, by chance; and of two copies the second is
// begun before the first. Kernels that serve calls do neither.
#if defined(TROUBLE_STALLS)
constexpr bool STALLS = true;
#else
constexpr bool STALLS = false;
#endif
#if defined(TROUBLE_SWAPPED_COPIES)
#define BOTH_COPIES(a, b) b, a
#else
#define BOTH_COPIES(a, b) a, b
#endif

__device__ inline void stall() {
    if constexpr (STALLS) {
        u32 clock, processor;
        asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
        asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
        const u32 mixed = (clock ^ processor * 0x9E3779B9u) * 0x85EBCA6Bu, chance = mixed >> 16;
        // One in 16, for up to two microseconds; no branch, which could part the threads of a warp.
        asm volatile("nanosleep.u32 %0;" ::"r"(chance % 16 ? 0u : chance >> 5) : "memory");
    }
}

// A barrier in shared memory whose phases end when all have arrived and all bytes have come.
struct Barrier {
    u32 address;

    __device__ void init(int arrivals) const {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(arrivals));
    }
    __device__ void arrive() const {
        stall();
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
    }
    // Arrive, and let the phase wait for so many bytes of copies.
    __device__ void expect(int bytes) const {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address),
                     "r"(bytes)
                     : "memory");
    }
    // Wait for the end of the phase of this parity; that before the first has parity 1.
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

// A place in a ring of stages, and how often the ring has been gone through.
template <int STAGES>
struct Place {
    int stage = 0;
    u32 round = 0;

    __device__ void next(int by = 1) {
        stage += by;
        if (stage >= STAGES) stage -= STAGES, round ^= 1;
    }
    __device__ Place after() const {
        Place place = *this;
        place.next();
        return place;
    }
};

__device__ inline void barriers_are_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Begin to copy a box of (column, row, head, batch) to shared memory; what is beyond is zero.
__device__ inline void load_box(u32 target, const TensorMap& map, int column, int row, int head,
                                int batch, const Barrier& done) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(target),
        "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(done.address)
        : "memory");
}
// Let the second-level cache have a box.
__device__ inline void prefetch_box(const TensorMap& map, int column, int row, int head,
                                    int batch) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map),
                 "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// Begin to copy a piece of global memory; addresses and bytes are multiples of 16.
__device__ inline void load_piece(u32 target, const void* source, int bytes, const Barrier& done) {
    done.expect(bytes);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(target), "l"(source), "r"(bytes), "r"(done.address)
        : "memory");
}

// Begin to store numbers in shared memory to global memory, or to add them there; wait, as the thread
// that has begun, until what it has begun is read, or is done altogether.
__device__ inline void send_piece(float* target, u32 source, int bytes, bool adds) {
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
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ inline void wait_read_pieces() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void wait_done_pieces() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// A number in global memory that tells another block of threads how far this one has come: pieces
// that this thread has seen done are there for pieces that the other begins after. They are copied
// and added by another proxy.
__device__ inline void tell_reached(u32* place, u32 value) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}
// What is added after the number that is waited for has been seen, and `is_reached`, comes after what
// the other block has added.
__device__ inline u32 look_reached(const u32* place) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
    return value;
}
__device__ inline void is_reached() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// What threads have written to shared memory is there for boxes and products after the next
// barrier.
__device__ inline void fence_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four 8 x 8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void store_matrices(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// Copy 16 bytes of shared memory to global memory, or none.
__device__ inline void copy_piece(void* target, u32 source, bool wanted) {
    asm volatile(
        "{.reg .pred wanted; .reg .b32 x, y, z, w; setp.ne.b32 wanted, %2, 0; "
        "ld.shared.v4.b32 {x, y, z, w}, [%1]; "
        "@wanted st.global.v4.b32 [%0], {x, y, z, w};}" ::"l"(target),
        "r"(source), "r"(int(wanted))
        : "memory");
}

// Named barrier: wait for THREADS arrivals. It counts whole warps, so each comes together; those of
// different warpgroups may come to it at different places of the code.
template <int THREADS>
__device__ inline void sync_named(int id) {
    __syncwarp();
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// The same, and whether it holds for any of the threads, which come to it at one place of the code.
template <int THREADS>
__device__ inline bool any_of(int id, bool holds) {
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

// Registers that this warpgroup gives back, or takes from what others have given.
template <int REGISTERS>
__device__ inline void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
