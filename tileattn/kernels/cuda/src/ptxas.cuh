// Layer 1. What the kernels for Hopper tell the compiler, in four tricks. None changes a result.
//
//     trick                               without it
//     order_after(never)                  ptxas moves waits ahead of independent arithmetic, so that
//                                         nothing overlaps with a GEMM; or it starts so much arithmetic
//                                         at once that registers spill
//     hide(x), opaque_zero()              NVVM computes all that depends on x once, ahead of its use
//                                         (column indices, descriptors), and keeps it in registers
//     fence_operand(d),                   registers of a GEMM in flight are read or moved (ptxas then
//     discard_operand(d)                  serialises all wgmma, C7510); or they hold dead accumulators
//                                         until the GEMM that overwrites them
//     uniform(x)                          a branch by warp counts as divergent, and takes more registers
//
// Example: bytes spilled (stores, loads) by backward_sm90 with NVRTC 13.5. Plain is bfloat16 with head
// dimension 64; the other call is float16, head dimension 128, with bias and dropout.
//
//                                         plain       bias and dropout
//     as it is                            0, 0        116, 156
//     without order_after                 -           132, 196
//     without hide                        -           372, 528
//     without opaque_zero                 0, 0        996, 1476
//     without uniform                     352, 356    412, 440
//
// To see whether a use is still needed, delete it, compile with `python -m tileattn compile`, and look
// for notes C75xx and spills in the compiler's log. Overlap does not show there: time the kernel.
#pragma once

#include "types.cuh"

// Compute what follows after a condition that never holds: ptxas moves nothing ahead of a branch.
__device__ inline void order_after(bool never) {
    if (__any_sync(~0u, never)) asm volatile("nanosleep.u32 1;");
}

// Compute what follows after a GEMM operand, whose bits are never all set.
template <class A, int K>
__device__ inline void order_after(const A (&operand)[K]) {
    u32 all = ~0u;
#pragma unroll
    for (int k = 0; k < K; ++k)
        all &= operand[k].r[0] & operand[k].r[1] & operand[k].r[2] & operand[k].r[3];
    order_after(all == ~0u);
}

// Hide the value of a 32-bit number: nothing that depends on it is computed earlier.
template <class T>
__device__ inline void hide(T& x) {
    asm volatile("" : "+r"(x));
}

// Return 0, which the compiler takes for an unknown number, a new one at each call.
__device__ inline u32 opaque_zero() {
    u32 zero;
    asm volatile("mov.u32 %0, 0;" : "=r"(zero));
    return zero;
}

// Keep reads, writes and moves of a GEMM's registers out of the time between its fence and its wait.
template <int N>
__device__ inline void fence_operand(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Declare registers dead before a GEMM that overwrites them: they are free until then.
template <int N>
__device__ inline void discard_operand(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "=f"(d[i])::"memory");
}

// Return a copy of an accumulator in a register of its own. Otherwise x keeps the accumulator's register, which
// the next GEMM needs, and ptxas serialises all wgmma (C7511).
__device__ inline float copied(float x) {
    float copy;
    asm volatile("mov.f32 %0, %1;" : "=f"(copy) : "f"(x));
    return copy;
}

// Return x, which is the same in all lanes of a warp, and tell the compiler that it is.
template <class T>
__device__ inline T uniform(T x, u32 lanes = ~0u) {
    return __shfl_sync(lanes, x, 0);
}

// Around each chunk of columns of a tile of scores, if the tile is CHUNKED: the chunks are computed one
// after another, so that only the registers of one chunk are live. The chunk ends before atom `end`.
// `never` is a value that its last element does not have; if it does have it, the warp sleeps for a
// nanosecond. (Written as one function that takes a lambda, this compiles to more instructions with NVRTC
// 13.5.)
template <bool CHUNKED, class Scores>
__device__ __forceinline__ void begin_chunk(Scores& s) {
    if constexpr (CHUNKED) hide(s.row), hide(s.column);
}
template <bool CHUNKED, class Scores>
__device__ __forceinline__ void end_chunk(Scores& s, int end, float never) {
    if constexpr (CHUNKED) order_after(s.x[0][end - 1][3] == never);
}
