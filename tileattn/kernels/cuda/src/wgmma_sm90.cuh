// Layer 1. wgmma of one warpgroup: d[64 x N] (+)= a[64 x 16] b[16 x N], with a in shared memory (SS) or
// registers (RS), and b in shared memory. PTX ISA, 9.7.15, wgmma.mma_async.
#pragma once

#include "ptxas.cuh"

// Order earlier writes to registers before the following GEMMs.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most PENDING groups are in flight.
template <int PENDING>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The matrix descriptor of a[m, k] or b[k, n] in shared memory. Rows are m or n (K-major), or k (MN-major).
template <bool MN_MAJOR>
struct Descriptor {
    u64 bits;
};

// wgmma(Element{}, d, a, b, add): d has N / 2 registers. If `add` is false d is overwritten.

// Made by python -m tools.wgmma_header --write, from here

#define SUMS(i) \
    "+f"(d[i + 0]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define NAMES_8 \
    "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", " \
    "%8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", " \
    "%16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_24 ", " \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_40 NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_48 NAMES_40 ", " \
    "%40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_56 NAMES_48 ", " \
    "%48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_64 NAMES_56 ", " \
    "%56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_80 NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_96 NAMES_80 ", " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_128 NAMES_96 ", " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
    "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(float16, float (&d)[8], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16."
                 "f32.f16.f16 {" NAMES_8 "}, %8, %9, p, 1, 1, %11, %12;}"
        : SUMS(0)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(float16, float (&d)[8], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16."
                 "f32.f16.f16 {" NAMES_8 "}, {%8, %9, %10, %11}, %12, p, 1, 1, %14;}"
        : SUMS(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(float16, float (&d)[16], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16."
                 "f32.f16.f16 {" NAMES_16 "}, %16, %17, p, 1, 1, %19, %20;}"
        : SUMS(0), SUMS(8)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(float16, float (&d)[16], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16."
                 "f32.f16.f16 {" NAMES_16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22;}"
        : SUMS(0), SUMS(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(float16, float (&d)[24], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %26, 0; wgmma.mma_async.sync.aligned.m64n48k16."
                 "f32.f16.f16 {" NAMES_24 "}, %24, %25, p, 1, 1, %27, %28;}"
        : SUMS(0), SUMS(8), SUMS(16)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(float16, float (&d)[24], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %29, 0; wgmma.mma_async.sync.aligned.m64n48k16."
                 "f32.f16.f16 {" NAMES_24 "}, {%24, %25, %26, %27}, %28, p, 1, 1, %30;}"
        : SUMS(0), SUMS(8), SUMS(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(float16, float (&d)[32], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16."
                 "f32.f16.f16 {" NAMES_32 "}, %32, %33, p, 1, 1, %35, %36;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(float16, float (&d)[32], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16."
                 "f32.f16.f16 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(float16, float (&d)[40], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %42, 0; wgmma.mma_async.sync.aligned.m64n80k16."
                 "f32.f16.f16 {" NAMES_40 "}, %40, %41, p, 1, 1, %43, %44;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(float16, float (&d)[40], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %45, 0; wgmma.mma_async.sync.aligned.m64n80k16."
                 "f32.f16.f16 {" NAMES_40 "}, {%40, %41, %42, %43}, %44, p, 1, 1, %46;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(float16, float (&d)[48], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %50, 0; wgmma.mma_async.sync.aligned.m64n96k16."
                 "f32.f16.f16 {" NAMES_48 "}, %48, %49, p, 1, 1, %51, %52;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(float16, float (&d)[48], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %53, 0; wgmma.mma_async.sync.aligned.m64n96k16."
                 "f32.f16.f16 {" NAMES_48 "}, {%48, %49, %50, %51}, %52, p, 1, 1, %54;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(float16, float (&d)[56], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %58, 0; wgmma.mma_async.sync.aligned.m64n112k16."
                 "f32.f16.f16 {" NAMES_56 "}, %56, %57, p, 1, 1, %59, %60;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(float16, float (&d)[56], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %61, 0; wgmma.mma_async.sync.aligned.m64n112k16."
                 "f32.f16.f16 {" NAMES_56 "}, {%56, %57, %58, %59}, %60, p, 1, 1, %62;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(float16, float (&d)[64], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16."
                 "f32.f16.f16 {" NAMES_64 "}, %64, %65, p, 1, 1, %67, %68;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(float16, float (&d)[64], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16."
                 "f32.f16.f16 {" NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(float16, float (&d)[80], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %82, 0; wgmma.mma_async.sync.aligned.m64n160k16."
                 "f32.f16.f16 {" NAMES_80 "}, %80, %81, p, 1, 1, %83, %84;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(float16, float (&d)[80], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %85, 0; wgmma.mma_async.sync.aligned.m64n160k16."
                 "f32.f16.f16 {" NAMES_80 "}, {%80, %81, %82, %83}, %84, p, 1, 1, %86;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(float16, float (&d)[96], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %98, 0; wgmma.mma_async.sync.aligned.m64n192k16."
                 "f32.f16.f16 {" NAMES_96 "}, %96, %97, p, 1, 1, %99, %100;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72), SUMS(80),
          SUMS(88)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(float16, float (&d)[96], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %101, 0; wgmma.mma_async.sync.aligned.m64n192k16."
                 "f32.f16.f16 {" NAMES_96 "}, {%96, %97, %98, %99}, %100, p, 1, 1, %102;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72), SUMS(80),
          SUMS(88)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(float16, float (&d)[128], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16."
                 "f32.f16.f16 {" NAMES_128 "}, %128, %129, p, 1, 1, %131, %132;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72), SUMS(80),
          SUMS(88), SUMS(96), SUMS(104), SUMS(112), SUMS(120)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(float16, float (&d)[128], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16."
                 "f32.f16.f16 {" NAMES_128 "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72), SUMS(80),
          SUMS(88), SUMS(96), SUMS(104), SUMS(112), SUMS(120)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[8], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16k16."
                 "f32.bf16.bf16 {" NAMES_8 "}, %8, %9, p, 1, 1, %11, %12;}"
        : SUMS(0)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[8], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16."
                 "f32.bf16.bf16 {" NAMES_8 "}, {%8, %9, %10, %11}, %12, p, 1, 1, %14;}"
        : SUMS(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[16], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16."
                 "f32.bf16.bf16 {" NAMES_16 "}, %16, %17, p, 1, 1, %19, %20;}"
        : SUMS(0), SUMS(8)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[16], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16."
                 "f32.bf16.bf16 {" NAMES_16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22;}"
        : SUMS(0), SUMS(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[24], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %26, 0; wgmma.mma_async.sync.aligned.m64n48k16."
                 "f32.bf16.bf16 {" NAMES_24 "}, %24, %25, p, 1, 1, %27, %28;}"
        : SUMS(0), SUMS(8), SUMS(16)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[24], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %29, 0; wgmma.mma_async.sync.aligned.m64n48k16."
                 "f32.bf16.bf16 {" NAMES_24 "}, {%24, %25, %26, %27}, %28, p, 1, 1, %30;}"
        : SUMS(0), SUMS(8), SUMS(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[32], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16."
                 "f32.bf16.bf16 {" NAMES_32 "}, %32, %33, p, 1, 1, %35, %36;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[32], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16."
                 "f32.bf16.bf16 {" NAMES_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[40], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %42, 0; wgmma.mma_async.sync.aligned.m64n80k16."
                 "f32.bf16.bf16 {" NAMES_40 "}, %40, %41, p, 1, 1, %43, %44;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[40], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %45, 0; wgmma.mma_async.sync.aligned.m64n80k16."
                 "f32.bf16.bf16 {" NAMES_40 "}, {%40, %41, %42, %43}, %44, p, 1, 1, %46;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[48], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %50, 0; wgmma.mma_async.sync.aligned.m64n96k16."
                 "f32.bf16.bf16 {" NAMES_48 "}, %48, %49, p, 1, 1, %51, %52;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[48], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %53, 0; wgmma.mma_async.sync.aligned.m64n96k16."
                 "f32.bf16.bf16 {" NAMES_48 "}, {%48, %49, %50, %51}, %52, p, 1, 1, %54;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[56], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %58, 0; wgmma.mma_async.sync.aligned.m64n112k16."
                 "f32.bf16.bf16 {" NAMES_56 "}, %56, %57, p, 1, 1, %59, %60;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[56], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %61, 0; wgmma.mma_async.sync.aligned.m64n112k16."
                 "f32.bf16.bf16 {" NAMES_56 "}, {%56, %57, %58, %59}, %60, p, 1, 1, %62;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[64], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16."
                 "f32.bf16.bf16 {" NAMES_64 "}, %64, %65, p, 1, 1, %67, %68;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[64], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16."
                 "f32.bf16.bf16 {" NAMES_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[80], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %82, 0; wgmma.mma_async.sync.aligned.m64n160k16."
                 "f32.bf16.bf16 {" NAMES_80 "}, %80, %81, p, 1, 1, %83, %84;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[80], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %85, 0; wgmma.mma_async.sync.aligned.m64n160k16."
                 "f32.bf16.bf16 {" NAMES_80 "}, {%80, %81, %82, %83}, %84, p, 1, 1, %86;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[96], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %98, 0; wgmma.mma_async.sync.aligned.m64n192k16."
                 "f32.bf16.bf16 {" NAMES_96 "}, %96, %97, p, 1, 1, %99, %100;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72), SUMS(80),
          SUMS(88)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[96], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %101, 0; wgmma.mma_async.sync.aligned.m64n192k16."
                 "f32.bf16.bf16 {" NAMES_96 "}, {%96, %97, %98, %99}, %100, p, 1, 1, %102;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72), SUMS(80),
          SUMS(88)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
template <bool A_MN, bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[128], Descriptor<A_MN> a,
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16."
                 "f32.bf16.bf16 {" NAMES_128 "}, %128, %129, p, 1, 1, %131, %132;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72), SUMS(80),
          SUMS(88), SUMS(96), SUMS(104), SUMS(112), SUMS(120)
        : "l"(a.bits), "l"(b.bits), "r"(int(add)), "n"(int(A_MN)), "n"(int(B_MN)));
}
template <bool B_MN>
__device__ inline void wgmma(bfloat16, float (&d)[128], const u32 (&a)[4],
                             Descriptor<B_MN> b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256k16."
                 "f32.bf16.bf16 {" NAMES_128 "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;}"
        : SUMS(0), SUMS(8), SUMS(16), SUMS(24), SUMS(32), SUMS(40), SUMS(48), SUMS(56), SUMS(64), SUMS(72), SUMS(80),
          SUMS(88), SUMS(96), SUMS(104), SUMS(112), SUMS(120)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits), "r"(int(add)),
          "n"(int(B_MN)));
}
#undef SUMS
#undef NAMES_8
#undef NAMES_16
#undef NAMES_24
#undef NAMES_32
#undef NAMES_40
#undef NAMES_48
#undef NAMES_56
#undef NAMES_64
#undef NAMES_80
#undef NAMES_96
#undef NAMES_128

// to here.
