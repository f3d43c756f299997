// Layer 3. Split-KV: one row over a range of keys without mma. In a GEMM, a masked-out key with a non-finite value
// spoils all rows.
#pragma once

#include "descale.cuh"

// Compute one row over some keys, by one warp and without mma, and store its unnormalised output in `sums`. The warp
// skips masked-out keys, so their values may be NaN. The lanes compute 32 columns at a time, one column each.
__device__ __noinline__ RowSum sum_row(const Params& p, int b, int kv, const SharedRow& row,
                                       Range keys, int length, Accum* sums) {
    const int lane = threadIdx.x % WARP;
    const AttentionMask attn_mask(p, b, row.h);
    const ScoreMod score_mod(p, b, row.h);
    const Sequence sequence(p, b);
    const Element* const q = q_row(p, sequence, row);
    const KvElement* const k = static_cast<const KvElement*>(p.k) + kv * p.k_at.h;
    const KvElement* const v = static_cast<const KvElement*>(p.v) + kv * p.v_at.h;
    KeyRows rows(p, sequence, length);
    const Descales descales(p, sequence, kv);
    auto score = [&](int j) {
        rows.find(j);
        const KvElement* const key = rows.row(k, p.k_at, min(j, length - 1), lane);
        if (j >= keys.hi || !attn_mask.visible(row.i, j)) return -infinity<Accum>();
        Accum product = 0, dsoftcap, dfunction;
        for (int d = 0; d < p.D; ++d)
            product = fma(Accum(widen(q[d])), Accum(widen(key[d])), product);
        if (QUANTISED) product *= *descales.k.of(rows, min(j, length - 1));
        return score_mod.score(product, row.i, j, score_mod.bias_of(row.i, j), dsoftcap, dfunction);
    };
    RowSum sum;
    sum.max_first = true;
    for (int j0 = keys.lo; j0 < keys.hi; j0 += WARP) sum.m = fmax(sum.m, score(j0 + lane));
    sum.m = clip_finite(warp_maximum(sum.m));
    const Accum softmax_scale_log2 = score_mod.softmax_scale_log2();
    for (int d0 = 0; d0 < VALUE_DIM; d0 += WARP) {
        const int d = d0 + lane;
        Accum total = 0, own_l = 0;
        for (int j0 = keys.lo; j0 < keys.hi; j0 += WARP) {
            const Accum s = score(j0 + lane);
            const Accum own = exp2_of(difference(s, sum.m) * softmax_scale_log2) *
                              Accum(1 << FORWARD_P_LOG2);
            own_l += own;
            const Accum scaled =
                QUANTISED ? own * *descales.v.of(rows, min(j0 + lane, length - 1)) : own;
            for (int n = 0; n < WARP; ++n) {
                const KvElement* const value = rows.row(v, p.v_at, min(j0 + n, length - 1), n);
                const Accum weight = __shfl_sync(~0u, scaled, n);
                if (__shfl_sync(~0u, s, n) != -infinity<Accum>() && d < p.Dv)
                    total = fma(weight, Accum(widen(value[d])), total);
            }
        }
        if (d < VALUE_DIM) sums[d] = total;
        sum.l = warp_sum(own_l);
    }
    __syncwarp();
    return sum;
}
