// Layer 1. mma of one warp: C[16 x 8] += A[16 x 16] B[16 x 8], one Atom for each element type.
//
// All atoms have the same layout of C: lane (g, t) = (lane / 4, lane % 4) holds elements 0 to 3, at rows g,
// g, g + 8, g + 8 and columns 2t, 2t + 1, 2t, 2t + 1. Atoms of 4- and 8-byte types permute each eight
// columns of A and rows of B alike, so that a lane's two numbers are columns 2t and 2t + 1. Then two atoms
// of C are the operand A of the next GEMM without shuffles.
//
// With MIRRORED the result has the bits of the transposed product (A and B exchanged) without MIRRORED.
// With NAN_SAFE it has infinity and NaN exactly where IEEE arithmetic has them, and the same bits
// elsewhere. Only the tf32 parts of float32 make a difference.
#pragma once

#include "types.cuh"

template <class T>
struct Atom;

// Elements of 8 bits are not multiplied as they are: they become operands of another type (quantised.cuh).
struct NoAtom {
    struct A {};
    struct B {};
};
template <>
struct Atom<float8_e4m3fn> : NoAtom {};
template <>
struct Atom<int8> : NoAtom {};

// For GPUs without the instruction: multiply the same fragments with shuffles.
template <class S, class Row, class Column>
__device__ __noinline__ void multiply_by_shuffles(S (&c)[4], Row row, Column column) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int other = 0; other < 4; ++other)
        for (int k = 0; k < 4; ++k) {
            const S low = __shfl_sync(~0u, row(0, k), 4 * g + other);
            const S high = __shfl_sync(~0u, row(1, k), 4 * g + other);
            const S b0 = __shfl_sync(~0u, column(k), 8 * t + other);
            const S b1 = __shfl_sync(~0u, column(k), 8 * t + 4 + other);
            c[0] = fma(low, b0, c[0]);
            c[1] = fma(low, b1, c[1]);
            c[2] = fma(high, b0, c[2]);
            c[3] = fma(high, b1, c[3]);
        }
}

// 16-bit types: a register of A or B has two neighbouring columns, as ldmatrix loads them.
template <class T>
struct HalfAtom {
    struct A {
        u32 r[4];
    };
    struct B {
        u32 r[2];
    };

    // Convert two neighbouring atoms of C to an operand A.
    __device__ static A a_of(const float (*c)[4]) {
        return {pack<T>(c[0][0], c[0][1]), pack<T>(c[0][2], c[0][3]), pack<T>(c[1][0], c[1][1]),
                pack<T>(c[1][2], c[1][3])};
    }

    template <bool MIRRORED = false, bool NAN_SAFE = false>
    __device__ static void mma(float (&c)[4], const A& a, const B& b) {
        auto half = [](u32 pair, int k) {
            return widen(T{static_cast<unsigned short>(k % 2 ? pair >> 16 : pair)});
        };
        multiply_by_shuffles(
            c, [&](int high, int k) { return half(a.r[k / 2 * 2 + high], k); },
            [&](int k) { return half(b.r[k / 2], k); });
    }
};

template <>
struct Atom<float16> : HalfAtom<float16> {
    template <bool MIRRORED = false, bool NAN_SAFE = false>
    __device__ static void mma(float (&c)[4], const A& a, const B& b) {
#if __CUDA_ARCH__ >= 800
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
#else
#pragma unroll
        for (int k = 0; k < 2; ++k)
            asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
                "{%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a.r[2 * k]), "r"(a.r[2 * k + 1]), "r"(b.r[k]));
#endif
    }
};

template <>
struct Atom<bfloat16> : HalfAtom<bfloat16> {
#if __CUDA_ARCH__ >= 800
    template <bool MIRRORED = false, bool NAN_SAFE = false>
    __device__ static void mma(float (&c)[4], const A& a, const B& b) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
    }
#endif
};

// Types of 4 and 8 bytes: a lane's elements of A, from the layout of C, and of B, in the order in which the
// instructions take them: four of A and two of B at a time.
template <class S>
struct WideAtom {
    struct A {
        S r[2][4];
    };
    struct B {
        S r[2][2];
    };

    __device__ static A a_of(const S (*c)[4]) {
        return {{{c[0][0], c[0][2], c[0][1], c[0][3]}, {c[1][0], c[1][2], c[1][1], c[1][3]}}};
    }
    // The lane's numbers: columns 2t and 2t + 1 of the first eight, then of the second.
    __device__ static B b_of(S x0, S x1, S x2, S x3) { return {{{x0, x1}, {x2, x3}}}; }

    template <bool MIRRORED = false, bool NAN_SAFE = false>
    __device__ static void mma(S (&c)[4], const A& a, const B& b) {
        multiply_by_shuffles(
            c, [&](int high, int k) { return a.r[k / 2][k % 2 * 2 + high]; },
            [&](int k) { return b.r[k / 2][k % 2]; });
    }
};

#if __CUDA_ARCH__ >= 800
// float32 by three products of tf32 parts (3xTF32), which have 11 significant bits. x = high + low: high is
// x rounded, low is the truncated rest, so at most the last bit of x is lost, 2**-23 of x. Then
//     x y = high low' + low high' + high high'
// has a relative error of at most 2**-21: 2**-23 for each factor, and 2**-22 for low low'. The root mean
// square is 2**-23.7. For numbers below 2**-113 the absolute error is up to 2**-136; for numbers from
// 2**128 - 2**116 on, whose high is truncated, the relative error is 2**-22. Tensor cores truncate their
// sums, too, so only a few products are summed there, and added to C outside. Ootomo and Yokota,
// arXiv:2203.03341.
//
// The low part of infinity is NaN, and a low part may have another sign than x. So sums with low parts are
// NaN if a factor is infinite, and may be wrong if they overflow. NAN_SAFE leaves such sums out: high high'
// alone is infinite or NaN exactly if x y is.
template <>
struct Atom<float> {
    struct A {
        u32 high[2][4], low[2][4];
    };
    struct B {
        u32 high[2][2], low[2][2];
    };

    // Round high by adding half a unit in its last place and truncating. The add rounds toward zero, so
    // that no finite number becomes infinite. The tensor cores truncate low: they ignore the last 13 bits.
    __device__ static void split(float x, u32& high, u32& low) {
        const float power = __uint_as_float(__float_as_uint(x) & 0xff800000);  // of 2, with a sign
        high = __float_as_uint(__fmaf_rz(power, 0x1p-11f, x)) & 0xffffe000;
        low = __float_as_uint(x - __uint_as_float(high));
    }
    __device__ static A a_of(const float (*c)[4]) {
        A a;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) split(c[i][e / 2 + e % 2 * 2], a.high[i][e], a.low[i][e]);
        return a;
    }
    __device__ static B b_of(float x0, float x1, float x2, float x3) {
        B b;
        split(x0, b.high[0][0], b.low[0][0]);
        split(x1, b.high[0][1], b.low[0][1]);
        split(x2, b.high[1][0], b.low[1][0]);
        split(x3, b.high[1][1], b.low[1][1]);
        return b;
    }
    __device__ static void mma_tf32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
            "{%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    template <bool MIRRORED = false, bool NAN_SAFE = false>
    __device__ static void mma(float (&c)[4], const A& a, const B& b) {
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            mma_tf32(sum, MIRRORED ? a.high[i] : a.low[i], MIRRORED ? b.low[i] : b.high[i]);
            mma_tf32(sum, MIRRORED ? a.low[i] : a.high[i], MIRRORED ? b.high[i] : b.low[i]);
        }
        if constexpr (NAN_SAFE)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (!is_finite(sum[e])) sum[e] = 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) mma_tf32(sum, a.high[i], b.high[i]);
#pragma unroll
        for (int e = 0; e < 4; ++e) c[e] += sum[e];
    }
};

template <>
struct Atom<double> : WideAtom<double> {
    template <bool MIRRORED = false, bool NAN_SAFE = false>
    __device__ static void mma(double (&c)[4], const A& a, const B& b) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#if __CUDA_ARCH__ >= 900
            asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, "
                "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
                : "d"(a.r[i][0]), "d"(a.r[i][1]), "d"(a.r[i][2]), "d"(a.r[i][3]), "d"(b.r[i][0]),
                  "d"(b.r[i][1]));
#else
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int high = 0; high < 2; ++high)
                    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, "
                        "{%0,%1};"
                        : "+d"(c[2 * high]), "+d"(c[2 * high + 1])
                        : "d"(a.r[i][2 * k + high]), "d"(b.r[i][k]));
#endif
    }
};
#else
template <>
struct Atom<float> : WideAtom<float> {};
template <>
struct Atom<double> : WideAtom<double> {};
#endif
