// Layer 3. Hopper's backward kernels, in fragments: from S^T to P and from dP to dS, for 64 keys
// and a tile of queries. Then the same NaN-safe.
#pragma once

#include "bwd_smem_sm90.cuh"
#include "gradient.cuh"

constexpr int QT = BLOCK_Q / 8, DT = HEAD_DIM / 8, VT = VALUE_DIM / 8;

using TileScores = Scores<true, 1, QT>;
using DSoftcap = Fragment<Accum, 1, HAS_SOFTCAP ? QT : 1>;  // slopes of the softcap at the scores
using Operands = Atom<Element>::A[BLOCK_Q / 16];            // P or dS as an operand of dV or dK

__device__ inline void convert(Operands& operands, const Fragment<Accum, 1, QT>& c) {
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 16; ++i) operands[i] = Atom<Element>::a_of(c.x[0] + 2 * i);
}

// From K Q^T to S: -infinity where a partial tile masks it out.
__device__ inline void modify_and_mask(const Params& p, const ScoreMod& score_mod, int b, int h,
                                       bool partial, TileScores& s, DSoftcap& dsoftcap) {
    s.apply(score_mod, WarpBias<true, 1, QT>(nullptr), [&](int, int n, int e, Accum slope, Accum) {
        if constexpr (HAS_SOFTCAP) dsoftcap.x[0][n][e] = slope;
    });
    if (partial) s.masked_fill(AttentionMask(p, b, h), DenseMask<true, 1, QT>{});
}

// From S to P, with the logsumexp of the tile's queries.
__device__ inline void exponentiate(const ScoreMod& score_mod, const float* lse_log2,
                                    TileScores& s) {
    const Lane lane;
    const Accum softmax_scale_log2 = score_mod.softmax_scale_log2();
#pragma unroll
    for (int n = 0; n < QT; ++n) {
        const float2 lse = *reinterpret_cast<const float2*>(lse_log2 + lane.column(0) + 8 * n);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            s.x[0][n][e] =
                exp2_of(exponent(s.x[0][n][e], softmax_scale_log2, e % 2 ? lse.y : lse.x));
    }
}

// From K Q^T to P.
__device__ inline void recompute_p(const Params& p, int b, int h, bool partial,
                                   const float* lse_log2, TileScores& s, DSoftcap& dsoftcap) {
    const ScoreMod score_mod(p, b, h);
    modify_and_mask(p, score_mod, b, h, partial, s, dsoftcap);
    exponentiate(score_mod, lse_log2, s);
}

// From P to P times the slope of the softcap, which dS takes in its place.
__device__ inline void apply_dsoftcap(TileScores& s, const DSoftcap& dsoftcap) {
    if constexpr (HAS_SOFTCAP)
        s.for_each([&](Accum& x, int, int, int, int n, int e) { x *= dsoftcap.x[0][n][e]; });
}

// From dP to dS, with P and delta of the tile's queries.
__device__ inline void compute_ds(const float* deltas, Fragment<Accum, 1, QT>& dp,
                                  const Fragment<Accum, 1, QT>& p) {
    const Lane lane;
#pragma unroll
    for (int n = 0; n < QT; ++n) {
        const float2 delta = *reinterpret_cast<const float2*>(deltas + lane.column(0) + 8 * n);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            dp.x[0][n][e] = score_gradient(p.x[0][n][e], dp.x[0][n][e], e % 2 ? delta.y : delta.x);
    }
}

// --- NaN-safe, as told in nonfinite.cuh ----------------------------------------------------------

// With a softcap what is not finite in q and k would have to be restored, too.
static_assert(!(NAN_SAFE && HAS_SOFTCAP), "gradients where the softcap is flat are not NaN");

using NonFiniteDout = NonFinite<Element, BLOCK_Q, VALUE_DIM>;
static_assert(NonFiniteDout::BYTES <= ScoreTile::BYTES, "the table takes a stage of dS");

// Whether a tile has a pair that is masked out. Queries past the end, which are zero, attend to
// nothing.
__device__ inline bool has_masked(const Params& p, int tile, bool partial) {
    return partial || (tile + 1) * BLOCK_Q > p.Nq;
}

// Copy k with zeros in place of what is not finite.
__device__ inline void clean_k(const Smem& smem) {
    named_barrier_sync<CONSUMER_THREADS>(CONSUMER_BARRIER);  // no GEMM still reads the last copy
    zero_non_finite<Element, BLOCK_K, HEAD_DIM, WARPS_M, false>(smem.clean_k(), smem.k(),
                                                                threadIdx.x / WARP);
    fence_async_shared();
    named_barrier_sync<CONSUMER_THREADS>(CONSUMER_BARRIER);
}

// The k that dQ takes.
__device__ inline KeyTile k_of_dq(const Smem& smem, bool masked) {
    return NAN_SAFE && masked ? smem.clean_k() : smem.k();
}

// Zero what is not finite in a tile of q and of dO, and record that of dO in the table; whether
// there was any. The next TMA loads into the stages come behind this fence.
__device__ inline bool clean_q_and_dout(const Smem& smem, int q_stage, int dout_stage,
                                        const NonFiniteDout& table) {
    // The scores are complete, and so is the GEMM that read the stage of dS that the table takes.
    named_barrier_sync<CONSUMER_THREADS>(CONSUMER_BARRIER);
    const int warp = threadIdx.x / WARP;
    const QueryTile q = smem.q(q_stage);
    zero_non_finite<Element, BLOCK_Q, HEAD_DIM, WARPS_M, true>(q, q, warp);
    const bool any = table.template clean<WARPS_M>(smem.dout(dout_stage), warp);
    // By way of memory: the warpgroups may be at two places in the code.
    u32* const found = smem.storage.found;
    if (threadIdx.x % WARP == 0) found[warp] = any;
    fence_async_shared();
    named_barrier_sync<CONSUMER_THREADS>(CONSUMER_BARRIER);
    return __any_sync(~0u, found[threadIdx.x % WARPS_M]);
}

// From K Q^T to P, 0 where it is not attended to, and to operands of dV. If `non_finite`, dV gets
// what was taken out of dO.
template <int NT>
__device__ inline Attended<1, QT> recompute_p_nan_safe(const Params& p, int b, int h, bool masked,
                                                       const float* lse_log2, TileScores& s,
                                                       Operands& probs, bool non_finite,
                                                       const NonFiniteDout& table,
                                                       Fragment<Accum, 1, NT>& dv) {
    const ScoreMod score_mod(p, b, h);
    DSoftcap dsoftcap;
    modify_and_mask(p, score_mod, b, h, masked, s, dsoftcap);
    Attended<1, QT> attended;
    attended.mark(s);
    exponentiate(score_mod, lse_log2, s);
    attended.fill_others(s, 0);
    convert(probs, s);
    if (__any_sync(~0u, non_finite))
        add_non_finite(dv, table, 0,
                       [&](int m, int half, int w) { return attended.word(m, half, w); });
    return attended;
}
