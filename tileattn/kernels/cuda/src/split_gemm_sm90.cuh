// Layer 2. Asynchronous GEMMs of float32 as three GEMMs of float16 numbers (splitting.cuh): the products of two
// high parts, and of a high and a low part.
//
// The tensor core cuts sums toward zero. So sums leave it every 64 terms, and are added in float32.
#pragma once

#include "gemm_sm90.cuh"
#include "splitting.cuh"

constexpr int SUM_STEPS = 64 / 16;  // wgmmas after which a sum of products of high parts leaves the tensor core

// C = X Y^T for 64 rows of x and 8 * NT rows of y, both planes of DEPTH columns: the sums of products of high
// parts, for each 64 columns, and all other products together.
template <int DEPTH, int NT>
struct SplitSums {
    static constexpr int STEPS = (DEPTH + 15) / 16, PARTS = (STEPS + SUM_STEPS - 1) / SUM_STEPS;
    Fragment<float, 1, NT> high[PARTS], low;

    template <class X, class Y>
    __device__ void issue(const X& x, const Y& y) {
#pragma unroll
        for (auto& part : high) discard_operand(accum_registers(part));
        discard_operand(accum_registers(low));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            const int at_high = high_column(16 * k), at_low = low_column(16 * k);
            wgmma(float16{}, accum_registers(high[k / SUM_STEPS]), x.k_major(0, at_high), y.k_major(0, at_high),
                  k % SUM_STEPS > 0);
            wgmma(float16{}, accum_registers(low), x.k_major(0, at_high), y.k_major(0, at_low), k > 0);
            wgmma(float16{}, accum_registers(low), x.k_major(0, at_low), y.k_major(0, at_high), true);
        }
        wgmma_commit();
    }
    template <int PENDING>
    __device__ void wait() {
        wgmma_wait<PENDING>();
#pragma unroll
        for (auto& part : high) fence_operand(accum_registers(part));
        fence_operand(accum_registers(low));
    }
    // Join the sums, for a lane's two rows with their inverse factors.
    __device__ void join(Fragment<float, 1, NT>& c, const float (&inverse)[2]) const {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float sum = high[0].x[0][n][e];
#pragma unroll
                for (int i = 1; i < PARTS; ++i) sum += high[i].x[0][n][e];
                c.x[0][n][e] = fmaf(low.x[0][n][e], inverse[e / 2] * LOW_UNIT, sum * inverse[e / 2]);
            }
    }
};

// 64 x 16 * K numbers as the first operand of a GEMM. The low part is not scaled: it shares sums with the high
// part. `shifted` is the high part for the low part of the other operand, which is scaled.
template <int K>
struct SplitOperand {
    Atom<float16>::A high[K], low[K], shifted[K];

    // Split the numbers of atoms begin to end - 1, each multiplied by the factor of its row.
    template <int NT>
    __device__ void split(const Fragment<float, 1, NT>& c, const float (&factor)[2], int begin = 0,
                          int end = 2 * K) {
#pragma unroll
        for (int k = begin / 2; k < end / 2; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const from = c.x[0][2 * k + i / 2] + i % 2 * 2;
                const float x = from[0] * factor[i % 2], y = from[1] * factor[i % 2];
                const u32 both = pack<float16>(x, y);
                high[k].r[i] = both;
                low[k].r[i] = pack<float16>(x - widen(float16{static_cast<unsigned short>(both)}),
                                            y - widen(float16{static_cast<unsigned short>(both >> 16)}));
                asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(shifted[k].r[i]) : "r"(both), "r"(0x10001000u));  // 2**-11
            }
    }
};

// Issue C = A Y for 16 * K rows of planes: A is in registers, Y is MN-major. Small products come first.
template <int K, class Y, int NT>
__device__ inline void split_gemm_async(Fragment<float, 1, NT>& c, const SplitOperand<K>& a, const Y& y) {
    auto& d = accum_registers(c);
    discard_operand(d);
    wgmma_fence();
    auto multiply = [&](const Atom<float16>::A(&part)[K], int column, bool add) {
#pragma unroll
        for (int k = 0; k < K; ++k)
            wgmma(float16{}, d, part[k].r, y.mn_major(16 * k, column, column + high_column(64)), add || k > 0);
    };
    multiply(a.low, high_column(0), false);
    multiply(a.shifted, low_column(0), true);
    multiply(a.high, high_column(0), true);
    wgmma_commit();
}

// Add the result, with an inverse factor for each of a lane's two rows.
template <int NT>
__device__ inline void add_scaled(Fragment<float, 1, NT>& sum, const Fragment<float, 1, NT>& part,
                                  const float (&inverse)[2]) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            sum.x[0][n][e] = fmaf(part.x[0][n][e], inverse[e / 2], sum.x[0][n][e]);
}

// The power of two of each of a lane's two rows of a fragment whose rows are spread over four lanes.
template <int NT>
__device__ inline void row_factors(const Fragment<float, 1, NT>& c, float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = 0;
#pragma unroll
        for (int n = 0; n < NT; ++n)
            most = fmaxf(most, fmaxf(fabsf(c.x[0][n][2 * half]), fabsf(c.x[0][n][2 * half + 1])));
#pragma unroll
        for (int step = 1; step < 4; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        factor[half] = power_of_two(most);
    }
}
