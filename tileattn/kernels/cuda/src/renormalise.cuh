// Layer 3. How the backward pass normalises rows of a LARGE_SCORES head. In float32 a logsumexp of 1e9 is
// rounded to a multiple of 64, and so would be the exponents of P. So the row maximum is subtracted from
// the scores, and the logarithm of the remaining sum replaces the logsumexp.
#pragma once

#include "head.cuh"

constexpr Accum EPSILON =
    Accum(1) / (1ll << (sizeof(Accum) == 8 ? 52 : 23));  // spacing of numbers from 1 on

// `m` is the maximum of the scores of query i, clipped to be finite, and `l` the sum of
// exp2((score - m) * softmax_scale_log2), 0 where it attends to nothing.
__device__ inline void renormalise_row(const Head& head, int i, Accum m, Accum l) {
    const Params& p = head.p;
    const Accum softmax_scale = Accum(p.softmax_scale), sink = head.sink();
    const Accum given = static_cast<const Accum*>(p.lse)[head.row(i)];
    const Denominator all(l, sink, sink_above(sink, m, softmax_scale));
    const Accum log_of_l = all.log2(), own = all.lse(m * softmax_scale);
    // The caller's logsumexp may come from another implementation, which rounds sums of D products
    // differently.
    const Accum roundings = 2 + 2 * Accum(sqrtf(float(p.D)));
    const Accum near = EPSILON * (roundings * fabs(m * softmax_scale) + 8 * (fabs(log_of_l) + 1));
    Accum& row_max = head.row_max()[i];
    row_max = 0;
    if (!is_finite(given) || l == 0) return;
    row_max = m;
    // If it is not near, it covers more keys than this call has.
    head.lse_log2()[i] = stored_lse(
        fabs(given - own) <= near ? log_of_l : fma(-m, softmax_scale, given) * LOG2_E);
}
