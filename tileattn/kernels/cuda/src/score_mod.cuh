// Layer 3. Score modifiers between Q K^T and the softmax, with their derivatives. As scores.py.
#pragma once

#include "quick.cuh"
#include "sequence.cuh"

// tanh, with a relative error of 2 ulp: small scores keep their digits, which 1 - 2 / (exp(2x) + 1) would
// lose. IS_NEAR: the caller knows that |x| < TANH_NEAR.
template <bool IS_NEAR = false>
__device__ inline float tanh_of(float x) {
    return !IS_16_BIT ? tanhf(x) : IS_NEAR ? quick_tanh_near(x) : quick_tanh(x);
}
template <bool IS_NEAR = false>
__device__ inline double tanh_of(double x) {
    return tanh(x);
}

// The score modifiers of one head.
struct ScoreMod {
    Accum scale, softcap, scale_over_cap, slope, offset;
    const BiasElement* bias;
    i64 bias_i, bias_j;
    ScoreFunction function;
    int Nq, Nk;

    __device__ ScoreMod(const Params& p, i64 b, i64 h)
        : scale(Accum(p.scale)),
          softcap(Accum(p.softcap)),
          scale_over_cap(HAS_SOFTCAP ? Accum(p.scale / p.softcap) : Accum(0)),
          slope(HAS_ALIBI ? static_cast<const Accum*>(p.alibi_slopes)[b * p.alibi_slopes_b + h]
                          : Accum(0)),
          offset(Accum(Sequence(p, b).offset(p))),
          bias(static_cast<const BiasElement*>(p.bias)),
          bias_i(p.bias_at.i),
          bias_j(p.bias_at.j),
          function(p, b, h),
          Nq(int(Sequence(p, b).Nq)),
          Nk(int(Sequence(p, b).Nk)) {
        if constexpr (HAS_BIAS) bias += b * p.bias_at.b + h * p.bias_at.h;
    }

    // The factor of a score in the exponent of 2.
    __device__ Accum softmax_scale_log2() const { return FOLD ? scale * LOG2_E : LOG2_E; }

    __device__ Accum bias_of(int i, int j) const {
        return HAS_BIAS ? Accum(widen(bias[i * bias_i + j * bias_j])) : Accum(0);
    }

    // The score of query i and key j from their dot product x and the bias `added`; and the derivatives of
    // the softcap and of score_mod. Every rounding is explicit, because kernels that subtract the maximum
    // of large scores must recompute the same bits.
    template <bool IS_NEAR = false>
    __device__ Accum score(Accum x, int i, int j, Accum added, Accum& dsoftcap,
                           Accum& dfunction) const {
        dsoftcap = dfunction = 1;
        if constexpr (FOLD) return x;
        Accum factor = scale;
        if constexpr (HAS_SOFTCAP) {
            x = tanh_of<IS_NEAR>(rounded_product(scale_over_cap, x));
            factor = softcap;
            dsoftcap = fma(-x, x, Accum(1));
        }
        if constexpr (HAS_ALIBI) {
            const Accum distance = fabs(difference(Accum(i) + offset, Accum(j)));
            x = fma(factor, x, rounded_product(-slope, distance)), factor = 1;
        }
        if constexpr (HAS_BIAS) x = fma(factor, x, added);
        auto finish = [&](auto s) -> Accum {
            // The score of a pair past the end does not matter, but it must read existing elements.
            if constexpr (HAS_SCORE_MOD)
                return function.score(s, min(i, Nq - 1), min(j, Nk - 1), dfunction);
            return s;
        };
        if constexpr (HAS_ALIBI || HAS_BIAS)
            return finish(x);
        else
            return finish(numpy::Product{factor, x});
    }
};
