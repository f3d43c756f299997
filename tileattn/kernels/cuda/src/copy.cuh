// Layer 1. Asynchronous copies to shared memory (cp.async), loads and stores of shared memory, ldmatrix,
// stmatrix.
#pragma once

#include "types.cuh"

__device__ inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Start to copy `valid` bytes, and write zeros up to SIZE. Both addresses are multiples of SIZE.
template <int SIZE>
__device__ inline void copy_async(u32 target, const char* source, int valid) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SIZE == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                     "r"(valid)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source),
                     "n"(SIZE), "r"(valid)
                     : "memory");
#else
    struct alignas(SIZE) Bytes {
        u32 words[SIZE / 4];
    };
    Bytes bytes = {};
    if (valid == SIZE)
        bytes = *reinterpret_cast<const Bytes*>(source);
    else
        for (int i = 0; i < valid; ++i) reinterpret_cast<char*>(&bytes)[i] = source[i];
    *reinterpret_cast<Bytes*>(__cvta_shared_to_generic(target)) = bytes;
#endif
}

// Start to copy one element of SIZE bytes if it is wanted, or write zeros. The predicate takes fewer instructions than
// a number of bytes.
template <int SIZE>
__device__ inline void copy_async_if(u32 target, const char* source, bool wanted) {
    static_assert(SIZE == 4 || SIZE == 8);
#if __CUDA_ARCH__ >= 800
    asm volatile("{.reg .pred ignored; setp.ne.b32 ignored, %3, 0; "
                 "cp.async.ca.shared.global [%0], [%1], %2, ignored;}" ::"r"(target),
                 "l"(source), "n"(SIZE), "r"(int(!wanted))
                 : "memory");
#else
    copy_async<SIZE>(target, source, wanted ? SIZE : 0);
#endif
}

// Start to copy SIZE bytes.
template <int SIZE>
__device__ inline void copy_async(u32 target, const char* source) {
#if __CUDA_ARCH__ >= 800
    if constexpr (SIZE == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(source),
                     "n"(SIZE)
                     : "memory");
#else
    copy_async<SIZE>(target, source, SIZE);
#endif
}

// Make the copies started so far a group.
__device__ inline void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most PENDING groups are in flight.
template <int PENDING>
__device__ inline void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

__device__ inline void load_shared(u32 (&x)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}
__device__ inline u32 load_shared(u32 address) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}
__device__ inline void store_shared(u32 address, const u32 (&x)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
                 "r"(x[2]), "r"(x[3])
                 : "memory");
}
__device__ inline void store_shared(u32 address, u32 x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Load four 8 x 8 matrices of 16-bit elements. Lane i passes the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ inline void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// Store four matrices transposed.
__device__ inline void store_matrices_transposed(u32 address, const u32 (&r)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
#else
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        u32 pair;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(pair) : "r"(r[n]));
        const u32 row = __shfl_sync(~0u, address, 8 * n + lane / 4);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(pair) : "memory");
    }
#endif
}

// Add four consecutive numbers to global memory.
__device__ inline void add_global(float* target, float x, float y, float z, float w) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x), "f"(y),
                 "f"(z), "f"(w)
                 : "memory");
#else
    atomicAdd(target, x);
    atomicAdd(target + 1, y);
    atomicAdd(target + 2, z);
    atomicAdd(target + 3, w);
#endif
}
