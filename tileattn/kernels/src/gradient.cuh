// Layer 3. Of one tile of the backward pass: probabilities recomputed from the logsumexp, and the
// gradient at the scores. Mirrors backward_tile in spec.py.
#pragma once

#include "mask.cuh"

// With Z the dropout (0 or 1 / (1 - p)) and t' the softcap's slope:
//     P = exp2(S - shift),  dP = Z (dO V^T),  dS = P (dP - delta).
template <bool TRANSPOSED, int MT, int NT>
struct TileGradient {
    Scores<TRANSPOSED, MT, NT> p;   // product of q and k; then P where kept, -P where dropped
    Scores<TRANSPOSED, MT, NT> ds;  // product of dout and v; then dS
    Fragment<Sum, MT, HAS_SOFTCAP ? NT : 1> derivatives;
    DenseMask<TRANSPOSED, MT, NT> mask;

    __device__ TileGradient(int row, int column) : p(row, column), ds(row, column) {}

    // Begin to read the mask, before the product.
    __device__ void look(const Sight& sight) {
        if constexpr (HAS_MASK) mask.read(sight, p.row, p.column);
    }

    // shift(m, n, e) is the logsumexp of the element's query in units of log 2; of a `large` head
    // scores are less row_max(m, n, e) first. look(p) is called where the scores are known and
    // -infinity where hidden.
    template <class RowMax, class Shift, class Look>
    __device__ void probabilities(const Terms& terms, const WarpBias<TRANSPOSED, MT, NT>& bias,
                                  const Sight& sight, const Dropout& dropout, int kind, bool large,
                                  RowMax row_max, Shift shift, Look look) {
        p.apply(terms, bias, [&](int m, int n, int e, Sum derivative) {
            if constexpr (HAS_SOFTCAP) derivatives.x[m][n][e] = derivative;
        });
        if constexpr (HAS_MASK) mask.share();
        if (HAS_MASK || kind == PARTIAL) p.hide(sight, mask);
        look(p);
        if (large)
            p.for_each([&](Sum& s, int, int, int m, int n, int e) {
                s = difference(s, row_max(m, n, e));
            });
        const Sum unit = terms.unit();
        p.for_each([&](Sum& s, int, int, int m, int n, int e) {
            // Only dbias has no second look at what is not finite: no NaN may reach a hidden pair.
            const bool hidden = HAS_BIAS && s == -infinity<Sum>();
            const Sum exponent = fma(s, unit, -shift(m, n, e));
            s = hidden ? Sum(0) : exp2_of(exponent);
        });
        if constexpr (HAS_DROPOUT)
            dropout.for_each<TRANSPOSED, MT, NT>(
                p.row, p.column, [&](int m, int n, int e, bool kept) {
                    if (!kept) p.x[m][n][e] = -p.x[m][n][e];
                });
    }

    // P with the dropped ones at zero; what stays still lacks the gain.
    __device__ static Sum dropped(Sum p) { return HAS_DROPOUT && p < 0 ? Sum(0) : p; }

    template <class Delta>
    __device__ void at_scores(Sum gain, Delta delta) {
        ds.for_each([&](Sum& x, int, int, int m, int n, int e) {
            const Sum probability = p.x[m][n][e];
            Sum dp = x;
            if constexpr (HAS_DROPOUT) dp = probability < 0 ? Sum(0) : dp * gain;
            const bool hidden = HAS_BIAS && probability == 0;  // as above
            const Sum size = HAS_DROPOUT ? fabs(probability) : probability;
            const Sum difference = dp - delta(m, n, e);
            x = hidden ? Sum(0) : size * difference;
        });
    }

    // From the gradient at the scores to that at the scaled products.
    __device__ void at_products() {
        if constexpr (HAS_SOFTCAP)
            ds.for_each([&](Sum& x, int, int, int m, int n, int e) {
                x *= derivatives.x[m][n][e];
            });
    }
};
