// Layer 3. One tile of the backward pass: P recomputed from the logsumexp, and dS. Mirrors
// backward_tile in spec.py.
#pragma once

#include "head.cuh"
#include "nonfinite.cuh"
#include "score_tile.cuh"

// Z is the dropout factor, 0 or 1 / (1 - p):
//     P = exp2(S softmax_scale_log2 - lse_log2),  dP = Z (dO V^T),  dS = P (dP - delta).
// P has its power of two (config.cuh), and delta its inverse (head.cuh). So dS has none, and dV, a sum of
// P, is divided by it at the end.
__device__ inline Accum score_gradient(Accum p, Accum dp, Accum delta) {
    return p * (BACKWARD_P_LOG2 == 0 ? dp - delta : fma(dp, BACKWARD_P_UNIT, -delta));
}

constexpr bool SCALES_DV = HAS_DROPOUT || BACKWARD_P_LOG2 > 0;
__device__ inline Accum dv_scale(const Params& p) {
    return HAS_DROPOUT ? Accum(p.dropout_scale) * BACKWARD_P_UNIT : BACKWARD_P_UNIT;
}

// P of float32 is at most 2**BACKWARD_P_LOG2. It is split with this power of two, by which dV is divided.
constexpr float SPLIT_P = 0x1p7f;

// With NAN_SAFE the P of masked-out pairs is -infinity until `zero_dropped`, and their dS is set to 0, so
// that no NaN reaches it.
template <bool TRANSPOSED, int MT, int NT, bool NAN_SAFE = false>
struct TileGradient {
    Scores<TRANSPOSED, MT, NT> p;   // Q K^T; then P where kept, -P where dropped
    Scores<TRANSPOSED, MT, NT> ds;  // dO V^T; then dS
    Fragment<Accum, MT, HAS_SOFTCAP ? NT : 1> dsoftcap;
    Fragment<Accum, MT, HAS_SCORE_MOD ? NT : 1> dfunction;  // derivative of score_mod
    DenseMask<TRANSPOSED, MT, NT> dense;

    __device__ TileGradient(int row, int column) : p(row, column), ds(row, column) {}

    // Start to load the dense mask, before the GEMM.
    __device__ void load_mask(const AttentionMask& attn_mask) {
        if constexpr (HAS_MASK) dense.load(attn_mask, p.row, p.column);
    }

    // -infinity is not a probability: it marks a masked-out pair.
    __device__ static bool is_masked(Accum p) { return NAN_SAFE && p == -infinity<Accum>(); }

    // From Q K^T to P. lse_log2(m, n, e) is the logsumexp of the element's query in base 2. In a `large`
    // head row_max(m, n, e) is first subtracted from the score.
    template <class Bias, class RowMax, class Lse>
    __device__ void recompute_p(const ScoreMod& score_mod, const Bias& bias,
                                const AttentionMask& attn_mask, const Dropout& dropout, int kind,
                                bool large, RowMax row_max, Lse lse_log2) {
        p.apply(score_mod, bias, [&](int m, int n, int e, Accum of_softcap, Accum of_function) {
            if constexpr (HAS_SOFTCAP) dsoftcap.x[m][n][e] = of_softcap;
            if constexpr (HAS_SCORE_MOD) dfunction.x[m][n][e] = of_function;
        });
        if constexpr (HAS_MASK) dense.share();
        if (HAS_MASK || kind == PARTIAL) p.masked_fill(attn_mask, dense);
        if (large)
            p.for_each([&](Accum& s, int, int, int m, int n, int e) {
                s = difference(s, row_max(m, n, e));
            });
        const Accum softmax_scale_log2 = score_mod.softmax_scale_log2();
        p.for_each([&](Accum& s, int, int, int m, int n, int e) {
            const bool masked = is_masked(s);
            const Accum own = exponent(s, softmax_scale_log2, lse_log2(m, n, e));
            s = masked ? -infinity<Accum>() : exp2_of(own);
        });
        if constexpr (HAS_DROPOUT)
            dropout.for_each<TRANSPOSED, MT, NT>(p.row, p.column,
                                                 [&](int m, int n, int e, bool kept) {
                                                     if (!kept) p.x[m][n][e] = -fabs(p.x[m][n][e]);
                                                 });
    }

    // True if some pair is masked out. Valid before `zero_dropped`.
    __device__ bool any_masked() {
        bool some = false;
        p.for_each([&](Accum x, int, int, int, int, int) { some = some || is_masked(x); });
        return some;
    }

    // Set P to 0 if it is dropped or masked out. The dropout scale comes later.
    __device__ void zero_dropped() {
        p.for_each([&](Accum& x, int, int, int, int, int) {
            if ((HAS_DROPOUT || NAN_SAFE) && x < 0) x = 0;
        });
    }

    // The attended pairs. Valid before `zero_dropped`. The sign marks dropped pairs, also for P = 0.
    __device__ Attended<MT, NT> attended() const {
        Attended<MT, NT> pairs;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const Accum x = p.x[m][n][e];
                    pairs.keep(m, n, e, !is_masked(x));
                    if (HAS_DROPOUT && signbit(x)) pairs.drop(m, n, e);
                }
        return pairs;
    }

    // From dP to dS before score_mod, which is also the gradient of the bias.
    template <class Delta>
    __device__ void compute_ds(Accum dropout_scale, Delta delta) {
        ds.for_each([&](Accum& x, int, int, int m, int n, int e) {
            const Accum signed_p = p.x[m][n][e];
            Accum dp = x;
            if constexpr (HAS_DROPOUT) dp = signed_p < 0 ? Accum(0) : dp * dropout_scale;
            const Accum size = HAS_DROPOUT ? fabs(signed_p) : signed_p;
            Accum own = score_gradient(size, dp, delta(m, n, e));
            if constexpr (HAS_SCORE_MOD) own *= dfunction.x[m][n][e];
            x = is_masked(signed_p) ? Accum(0) : own;
        });
    }

    // The power of two by which dS of this warp must be divided to fit float16, nearly always 1.
    __device__ Accum excess() {
        if constexpr (!HAS_FINITE_SUMS<Element>) return 1;
        Accum largest = 0;
        ds.for_each([&](Accum x, int, int, int, int, int) {
            if (is_finite(x)) largest = fmax(largest, fabs(x));
        });
        largest = warp_maximum(largest);
        constexpr Accum OVERFLOWS = 65520;  // the smallest number that rounds to infinity
        if (largest < OVERFLOWS) return 1;
        const u32 exponent = __float_as_uint(float(largest)) >> 23;
        return __uint_as_float((exponent - 14) << 23);  // the quotient is below 2**15
    }

    // From dS after the softcap to dS before it.
    __device__ void apply_dsoftcap() {
        if constexpr (HAS_SOFTCAP)
            ds.for_each([&](Accum& x, int, int, int m, int n, int e) {
                x *= is_masked(p.x[m][n][e]) ? Accum(1) : dsoftcap.x[m][n][e];
            });
    }
};
