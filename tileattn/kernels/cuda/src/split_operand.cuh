// Layer 2. Operands in registers for GEMMs of float32 as two float16 numbers (splitting.cuh).
#pragma once

#include "fragment.cuh"
#include "splitting.cuh"

// 16 rows and 16 columns of a first operand of a GEMM.
struct SplitStep {
    Atom<float16>::A high, low;
};

// A warp's 16 rows of 16 * K numbers as the first operand of a GEMM.
template <int K>
struct SplitOperand {
    static constexpr int STEPS = K;
    Atom<float16>::A high[K], low[K];

    __device__ SplitStep step(int k) const { return {high[k], low[k]}; }

    // Split the numbers of atoms begin to end - 1 of row tile m, each multiplied by the factor of its row.
    template <int MT, int NT>
    __device__ void split(const Fragment<float, MT, NT>& c, const float (&factor)[2], int begin = 0,
                          int end = 2 * K, int m = 0) {
#pragma unroll
        for (int k = begin / 2; k < end / 2; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* const from = c.x[m][2 * k + i / 2] + i % 2 * 2;
                const float x = rounded_product(from[0], factor[i % 2]), y = rounded_product(from[1], factor[i % 2]);
                const u32 both = pack<float16>(x, y);
                const float16 first{static_cast<unsigned short>(both)}, second{static_cast<unsigned short>(both >> 16)};
                high[k].r[i] = both;
                low[k].r[i] = pack<float16>((x - widen(first)) / LOW_UNIT, (y - widen(second)) / LOW_UNIT);
            }
    }
};

// The power of two of each of a lane's two rows. Four lanes share a row.
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

// The larger of two numbers, or NaN if one is NaN.
__device__ inline float maximum_or_nan(float x, float y) {
    float largest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(x), "f"(y));
    return largest;
}

// Split a warp's 16 rows of 16 * K numbers, with one factor for each row. load(k, i) returns two neighbours of step
// k, in the order of an operand's registers: rows alternate, then sides. take(k, high, low) gets the operands of a
// step. Returns the inverse factors of a lane's two rows; infinity if a row is not finite.
template <int K, class Load, class Take>
__device__ inline void split_own_rows(Load load, float (&inverse)[2], Take take) {
    // Up to 128 columns stay in registers; wider rows are loaded again.
    constexpr bool KEPT = K <= 8;
    float2 kept[KEPT ? K : 1][4];
    float most[2] = {}, factor[2];
#pragma unroll(KEPT ? K : 4)
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = load(k, i);
            if constexpr (KEPT) kept[k][i] = pair;
            most[i % 2] = maximum_or_nan(most[i % 2], maximum_or_nan(fabsf(pair.x), fabsf(pair.y)));
        }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int step = 1; step < 4; step *= 2)
            most[half] = maximum_or_nan(most[half], __shfl_xor_sync(~0u, most[half], step));
        factor[half] = power_of_two(is_finite(most[half]) ? most[half] : 0);
        inverse[half] = is_finite(most[half]) ? inverse_power(factor[half]) : infinity<float>();
    }
#pragma unroll(KEPT ? K : 4)
    for (int k = 0; k < K; ++k) {
        Atom<float16>::A high, low;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = KEPT ? kept[KEPT ? k : 0][i] : load(k, i);
            const Split first = split(pair.x, factor[i % 2]), second = split(pair.y, factor[i % 2]);
            high.r[i] = u32(first.high.bits) | u32(second.high.bits) << 16;
            low.r[i] = u32(first.low.bits) | u32(second.low.bits) << 16;
        }
        take(k, high, low);
    }
}
