// Layer 3. Terms of the score between the product of q and k and the softmax, with their
// derivative: twin of scores.py.
#pragma once

#include "config.cuh"
#include "params.cuh"

// Of relative error 2 ulp: small scores must keep their digits, so no difference from 1 will do.
__device__ inline float tanh_of(float x) { return tanhf(x); }
__device__ inline double tanh_of(double x) { return tanh(x); }

// Of one head.
struct Terms {
    Sum scale, softcap, scale_over_cap, slope, offset;
    const BiasElement* bias;
    i64 bias_i, bias_j;
    int Nq, Nk;

    __device__ Terms(const Params& p, i64 b, i64 h)
        : scale(Sum(p.scale)),
          softcap(Sum(p.softcap)),
          scale_over_cap(HAS_SOFTCAP ? Sum(p.scale / p.softcap) : Sum(0)),
          slope(HAS_ALIBI ? static_cast<const Sum*>(p.slopes)[b * p.slopes_b + h] : Sum(0)),
          offset(Sum(p.offsets ? p.offsets[b] : p.offset)),
          bias(static_cast<const BiasElement*>(p.bias)),
          bias_i(p.bias_at.i),
          bias_j(p.bias_at.j),
          Nq(int(p.Nq)),
          Nk(int(p.Nk)) {
        if constexpr (HAS_BIAS) bias += b * p.bias_at.b + h * p.bias_at.h;
    }

    // What multiplies a product, or a score that `score` has made, in the exponent of 2.
    __device__ Sum unit() const { return FOLD ? scale * LOG2_E : LOG2_E; }

    __device__ Sum bias_of(int i, int j) const {
        return HAS_BIAS ? Sum(widen(bias[i * bias_i + j * bias_j])) : Sum(0);
    }

    // Score of query i and key j from their product and bias, and its derivative by the scaled
    // product. Every operation is spelled out: kernels that compare large scores need the same bits.
    __device__ Sum score(Sum x, int i, int j, Sum added, Sum& derivative) const {
        derivative = 1;
        if constexpr (FOLD) return x;
        Sum factor = scale;
        if constexpr (HAS_SOFTCAP) {
            x = tanh_of(rounded_product(scale_over_cap, x));
            factor = softcap;
            derivative = fma(-x, x, Sum(1));
        }
        if constexpr (HAS_ALIBI) {
            const Sum distance = fabs(difference(Sum(i) + offset, Sum(j)));
            x = fma(-slope, distance, rounded_product(factor, x)), factor = 1;
        }
        return HAS_BIAS ? fma(factor, x, added) : rounded_product(factor, x);
    }
};
