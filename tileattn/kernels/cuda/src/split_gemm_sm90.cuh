// Layer 2. Asynchronous GEMMs of float32 as three GEMMs of float16 numbers (splitting.cuh): the products of two
// high parts, and of a high and a low part.
//
// The tensor core cuts sums toward zero. So sums leave it every 64 terms, or 128 if registers are few, and are added
// in float32.
#pragma once

#include "gemm_sm90.cuh"
#include "split_operand.cuh"

// The wgmmas for DEPTH columns, and for a partial sum of products of high parts.
template <int DEPTH>
struct SplitSteps {
    static constexpr int STEPS = (DEPTH + 15) / 16, SUM_STEPS = (DEPTH <= 128 ? 64 : 128) / 16;
    static constexpr int PARTS = (STEPS + SUM_STEPS - 1) / SUM_STEPS;
};

// C = X Y^T for 64 rows of x and 8 * NT rows of y, both planes of DEPTH columns: the sums of products of high
// parts, for each part of the columns, and all other products together.
template <int DEPTH, int NT, bool STACKED = (NT <= 4)>
struct SplitSums : SplitSteps<DEPTH> {
    using SplitSteps<DEPTH>::STEPS, SplitSteps<DEPTH>::SUM_STEPS, SplitSteps<DEPTH>::PARTS;
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

// The same for few rows of y, where the tensor core would wait for x: one wgmma reads x for the high and the low parts
// of y, which lie one after the other in a tile.
template <int DEPTH, int NT>
struct SplitSums<DEPTH, NT, true> : SplitSteps<DEPTH> {
    using SplitSteps<DEPTH>::STEPS, SplitSteps<DEPTH>::SUM_STEPS, SplitSteps<DEPTH>::PARTS;
    Fragment<float, 1, 2 * NT> of_high[PARTS];  // products of high parts of x
    Fragment<float, 1, NT> of_low;

    template <class X, class Y>
    __device__ void issue(const X& x, const Y& y) {
        static_assert(Y::SLICE == 8 * NT * Y::PITCH, "low parts follow high parts");
#pragma unroll
        for (auto& part : of_high) discard_operand(accum_registers(part));
        discard_operand(accum_registers(of_low));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            const int at_high = high_column(16 * k), at_low = low_column(16 * k);
            const auto rows = y.k_major(0, at_high);
            wgmma(float16{}, accum_registers(of_high[k / SUM_STEPS]), x.k_major(0, at_high), rows, k % SUM_STEPS > 0);
            wgmma(float16{}, accum_registers(of_low), x.k_major(0, at_low), rows, k > 0);
        }
        wgmma_commit();
    }
    template <int PENDING>
    __device__ void wait() {
        wgmma_wait<PENDING>();
#pragma unroll
        for (auto& part : of_high) fence_operand(accum_registers(part));
        fence_operand(accum_registers(of_low));
    }
    __device__ void join(Fragment<float, 1, NT>& c, const float (&inverse)[2]) const {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float high = of_high[0].x[0][n][e], low = of_low.x[0][n][e];
#pragma unroll
                for (int i = 0; i < PARTS; ++i) low += of_high[i].x[0][NT + n][e];
#pragma unroll
                for (int i = 1; i < PARTS; ++i) high += of_high[i].x[0][n][e];
                c.x[0][n][e] = fmaf(low, inverse[e / 2] * LOW_UNIT, high * inverse[e / 2]);
            }
    }
};

// Compute what follows after atoms begin to end - 1 of a sum, whose bits are never all set.
template <int NT>
__device__ inline void order_after(const Fragment<float, 1, NT>& sum, int begin, int end) {
    u32 all = ~0u;
#pragma unroll
    for (int n = begin; n < end; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) all &= __float_as_uint(sum.x[0][n][e]);
    order_after(all == ~0u);
}

// Add A Y to `sum`, for 16 * K rows of planes, with an inverse factor for each of a lane's two rows: A is in
// registers, Y is MN-major. MOST atoms at a time, from FIRST on: with all of them the sums would need twice the
// registers. The warpgroup waits for its GEMMs, while others compute. Without IN_TURN, ptxas issues the GEMMs of the
// next atoms before it adds the products of these. That takes more registers.
template <int MOST, bool IN_TURN = false, int FIRST = 0, int K, class Y, int NT>
__device__ inline void add_split_product(Fragment<float, 1, NT>& sum, const SplitOperand<K>& a, const Y& y,
                                         const float (&inverse)[2]) {
    constexpr int COUNT = NT - FIRST < MOST ? NT - FIRST : MOST;
    Fragment<float, 1, COUNT> high, low;
    auto &high_sums = accum_registers(high), &low_sums = accum_registers(low);
    discard_operand(high_sums), discard_operand(low_sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const auto y_high = y.mn_major(16 * k, high_column(8 * FIRST));
        const auto y_low = y.mn_major(16 * k, low_column(8 * FIRST));
        wgmma(float16{}, high_sums, a.high[k].r, y_high, k > 0);
        wgmma(float16{}, low_sums, a.high[k].r, y_low, k > 0);
        wgmma(float16{}, low_sums, a.low[k].r, y_high, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(high_sums), fence_operand(low_sums);
#pragma unroll
    for (int n = 0; n < COUNT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& x = sum.x[0][FIRST + n][e];
            x = fmaf(low.x[0][n][e], inverse[e / 2] * LOW_UNIT, fmaf(high.x[0][n][e], inverse[e / 2], x));
        }
    if constexpr (IN_TURN) order_after(sum, FIRST, FIRST + COUNT);
    if constexpr (FIRST + COUNT < NT) add_split_product<MOST, IN_TURN, FIRST + COUNT>(sum, a, y, inverse);
}
