// Layer 1. Branch-free float32 functions for calls with 16-bit elements, accurate to a few ulp.
#pragma once

#include "types.cuh"

// Division. Exact if the quotient is representable, so that floor(x / y) is right.
__device__ inline float quick_quotient(float x, float y) {
    const float up = fabs(y) < 0x1p-100f ? 0x1p24f : 1.0f;  // keeps the reciprocal finite
    const float divisor = y * up, inverse = reciprocal_of(divisor), first = x * up * inverse;
    const float better = fma(fma(-first, divisor, x * up), inverse, first);
    return is_finite(better) ? better : first;
}

// Below this argument an odd polynomial, fitted for relative error: small arguments keep their digits.
constexpr float TANH_NEAR = 0.55f;
__device__ inline float quick_tanh_near(float x) {
    const float square = x * x;
    float factor = 0x1.0da926p-6f;
    factor = fma(factor, square, -0x1.af96bp-5f);
    factor = fma(factor, square, 0x1.10d01ap-3f);
    factor = fma(factor, square, -0x1.55545ap-2f);
    return fma(factor * square, x, x);
}
__device__ inline float quick_tanh(float x) {
    constexpr float TWICE_LOG2_E = 2.885390081777927f;
    const float far = fma(-2.0f, reciprocal_of(exp2_of(fabs(x) * TWICE_LOG2_E) + 1.0f), 1.0f);
    return fabs(x) < TANH_NEAR ? quick_tanh_near(x) : copysignf(far, x);
}
