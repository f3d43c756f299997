// Layer 3. Of one tile of the backward pass: probabilities recomputed from the logsumexp, and the
// gradient at the scores. Mirrors backward_tile in spec.py.
#pragma once

#include "mask.cuh"
#include "nonfinite.cuh"
#include "plain.cuh"

// With Z the dropout (0 or 1 / (1 - p)) and t' the softcap's slope:
//     P = exp2(S - shift),  dP = Z (dO V^T),  dS = P (dP - delta).
//
// NaN-safe, P of pairs that are not attended to is marked, until it is taken by `weights`, and
// their dS is selected to be 0: no NaN reaches them.
template <bool TRANSPOSED, int MT, int NT, bool NAN_SAFE = false>
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

    // No probability is -infinity.
    __device__ static bool is_masked(Sum p) { return NAN_SAFE && p == -infinity<Sum>(); }

    // shift(m, n, e) is the logsumexp of the element's query in units of log 2; of a `large` head
    // scores are less row_max(m, n, e) first.
    template <class RowMax, class Shift>
    __device__ void probabilities(const Terms& terms, const WarpBias<TRANSPOSED, MT, NT>& bias,
                                  const Sight& sight, const Dropout& dropout, int kind, bool large,
                                  RowMax row_max, Shift shift) {
        p.apply(terms, bias, [&](int m, int n, int e, Sum derivative) {
            if constexpr (HAS_SOFTCAP) derivatives.x[m][n][e] = derivative;
        });
        if constexpr (HAS_MASK) mask.share();
        if (HAS_MASK || kind == PARTIAL) p.hide(sight, mask);
        if (large)
            p.for_each([&](Sum& s, int, int, int m, int n, int e) {
                s = difference(s, row_max(m, n, e));
            });
        const Sum unit = terms.unit();
        p.for_each([&](Sum& s, int, int, int m, int n, int e) {
            const bool masked = is_masked(s);
            const Sum exponent = fma(s, unit, -shift(m, n, e));
            s = masked ? -infinity<Sum>() : exp2_of(exponent);
        });
        if constexpr (HAS_DROPOUT)
            dropout.for_each<TRANSPOSED, MT, NT>(
                p.row, p.column, [&](int m, int n, int e, bool kept) {
                    if (!kept) p.x[m][n][e] = -fabs(p.x[m][n][e]);
                });
    }

    // Whether some pair is not attended to, before `weights`.
    __device__ bool hides_some() {
        bool some = false;
        p.for_each([&](Sum x, int, int, int, int, int) { some = some || is_masked(x); });
        return some;
    }

    // Take P with the dropped ones, and those that are masked out, at zero. What stays still lacks
    // the gain.
    __device__ void weights() {
        p.for_each([&](Sum& x, int, int, int, int, int) {
            if ((HAS_DROPOUT || NAN_SAFE) && x < 0) x = 0;
        });
    }

    // The pairs that are attended to, before `weights`. The sign tells what is dropped, of 0 too.
    __device__ Attended<MT, NT> attended() const {
        Attended<MT, NT> pairs;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const Sum x = p.x[m][n][e];
                    pairs.keep(m, n, e, !is_masked(x));
                    if (HAS_DROPOUT && signbit(x)) pairs.drop(m, n, e);
                }
        return pairs;
    }

    template <class Delta>
    __device__ void at_scores(Sum gain, Delta delta) {
        ds.for_each([&](Sum& x, int, int, int m, int n, int e) {
            const Sum probability = p.x[m][n][e];
            Sum dp = x;
            if constexpr (HAS_DROPOUT) dp = probability < 0 ? Sum(0) : dp * gain;
            const Sum size = HAS_DROPOUT ? fabs(probability) : probability;
            const Sum difference = dp - delta(m, n, e);
            x = is_masked(probability) ? Sum(0) : size * difference;
        });
    }

    // A power of two by which dS of this warp is divided, so that float16 has room for it; mostly 1.
    __device__ Sum excess() {
        if constexpr (!HAS_FINITE_SUMS<Element>) return 1;
        Sum largest = 0;
        ds.for_each([&](Sum x, int, int, int, int, int) {
            if (is_finite(x)) largest = fmax(largest, fabs(x));
        });
        largest = warp_maximum(largest);
        constexpr Sum OVERFLOWS = 65520;  // the least that is rounded to infinity
        if (largest < OVERFLOWS) return 1;
        const u32 exponent = __float_as_uint(float(largest)) >> 23;
        return __uint_as_float((exponent - 14) << 23);  // what is left is below 2**15
    }

    // From the gradient at the scores to that at the scaled products.
    __device__ void at_products() {
        if constexpr (HAS_SOFTCAP)
            ds.for_each([&](Sum& x, int, int, int m, int n, int e) {
                x *= is_masked(p.x[m][n][e]) ? Sum(1) : derivatives.x[m][n][e];
            });
    }
};
