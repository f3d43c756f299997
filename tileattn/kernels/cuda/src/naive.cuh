// Layer 3. Unfused attention: one warp for each row, for head dimensions that no tiled kernel supports.
// Masked-out pairs are skipped, not multiplied by zero, so every pass is NaN-safe.
#pragma once

#include "gradient.cuh"

// The row of this warp: a query or a key of a head. The last warps may have none.
struct NaiveRow {
    int b, h, i;
    bool is_there;

    __device__ NaiveRow(const Params& p, bool is_query, int block) {
        const i64 row = i64(block) * (THREADS / WARP) + threadIdx.x / WARP;
        const i64 heads = is_query ? p.Hq : p.Hkv;
        const int count = block_count<1>(p, is_query ? p.Nq : p.Nk);
        is_there = row < p.B * heads * count;
        if (!is_there) return;
        const HeadBlock<1> at(p, is_query ? p.query_ends() : p.key_ends(), int(heads),
                              int(row / count), int(row % count));
        const Sequence sequence(p, at.b);
        b = at.b, h = at.h, i = at.block;
        is_there = !PACKED || i < (is_query ? sequence.Nq : sequence.Nk);
        if constexpr (ONLY_FLAGGED)
            is_there = is_there && head_flags(p, b, is_query ? h / int(p.group) : h) & FLAGGED_HEADS;
    }
};

// Call run(row) for the row of each warp, or with ONLY_FLAGGED for all rows of flagged heads.
template <class Run>
__device__ inline void for_rows(const Params& p, bool is_query, Run run) {
    const i64 rows = is_query ? p.B * p.Hq * block_count<1>(p, p.Nq) : p.B * p.Hkv * block_count<1>(p, p.Nk);
    for_blocks(p, (rows + THREADS / WARP - 1) / (THREADS / WARP), [&](int block) {
        const NaiveRow row(p, is_query, block);
        if (row.is_there) run(row);
    });
}

// P and dS of one pair.
struct PairGradient {
    bool attended;
    Accum p;       // with dropout
    Accum ds;      // the gradient of the bias: before score_mod
    Accum capped;  // the gradient of scale * Q K^T: also before the softcap
};

__device__ inline PairGradient pair_gradient(const Head& head, int i, int j) {
    const Params& p = head.p;
    Accum dsoftcap, dfunction;
    Accum s = head.score(i, j, dsoftcap, dfunction);
    if (s == -infinity<Accum>()) return {false, 0, 0, 0};
    if (head.needs_max_first()) s = difference(s, head.row_max()[i]);
    const Accum own = exp2_of(exponent(s, head.score_mod.softmax_scale_log2(), head.lse_log2()[i]));
    const Accum keep =
        HAS_DROPOUT ? (head.dropout.keeps(i, j) ? Accum(p.dropout_scale) : Accum(0)) : Accum(1);
    Accum dp = 0;
    for (int d = 0; d < p.Dv; ++d)
        dp = fma(Accum(widen(head.dout[i * p.dout_at.n + d])),
                 Accum(widen(head.v[j * p.v_at.n + d])), dp);
    Accum ds = score_gradient(own, dp * keep, head.delta()[i]);
    if constexpr (HAS_SCORE_MOD) ds *= dfunction;
    return {true, own * keep * BACKWARD_P_UNIT, ds, ds * dsoftcap};
}

// Call add(lane, weight) in every lane, once for each lane of the warp whose pair is attended.
template <class Row>
__device__ inline void for_each_attended(bool attended, Accum weight, Row add) {
    for (u32 left = __ballot_sync(~0u, attended); left; left &= left - 1) {
        const int other = __ffs(left) - 1;
        add(other, __shfl_sync(~0u, weight, other));
    }
}

// Compute the maximum of the scores of query i, clipped to be finite, and the sum of exp2 of scores minus
// it.
__device__ inline void sum_of_row(const Head& head, int i, Accum& m, Accum& l) {
    const int lane = threadIdx.x % WARP;
    const Range keys = head.attn_mask.window.key_range(i, i + 1);
    m = -infinity<Accum>(), l = 0;
    for (int j = keys.lo + lane; j < keys.hi; j += WARP) m = fmax(m, head.score(i, j));
    m = clip_finite(warp_maximum(m));
    for (int j = keys.lo + lane; j < keys.hi; j += WARP)
        l += exp2_of(difference(head.score(i, j), m) *
                     head.score_mod.softmax_scale_log2());
    l = warp_sum(l);
}

// Columns of a row that a lane sums at a time: d0 + lane, d0 + lane + 32 and so on. Scores are computed again
// for the columns after them.
constexpr int COLUMNS_OF_LANE = 16, COLUMNS_AT_A_TIME = WARP * COLUMNS_OF_LANE;

// Call visit(n, d) for each of these columns that the row has: d is the n-th of the lane.
template <class Visit>
__device__ inline void for_columns(i64 d0, i64 columns, Visit visit) {
#pragma unroll
    for (int n = 0; n < COLUMNS_OF_LANE; ++n) {
        const i64 d = d0 + n * WARP + threadIdx.x % WARP;
        if (d < columns) visit(n, d);
    }
}
// Add some columns of a row, times a weight.
__device__ inline void add_columns(Accum (&totals)[COLUMNS_OF_LANE], i64 d0, i64 columns, Accum weight,
                                   const Element* row) {
    for_columns(d0, columns, [&](int n, i64 d) { totals[n] = fma(weight, Accum(widen(row[d])), totals[n]); });
}

// Compute out and lse of query i.
__device__ inline void forward_row(const Params& p, i64 b, i64 h, int i) {
    const Head head(p, b, h);
    const Accum sink = head.sink();
    const int lane = threadIdx.x % WARP;
    const Range keys = head.attn_mask.window.key_range(i, i + 1);
    Accum m, l;
    sum_of_row(head, i, m, l);
    const Accum softmax_scale_log2 = head.score_mod.softmax_scale_log2(),
                softmax_scale = Accum(p.softmax_scale);
    const Denominator all(l, sink, sink_above(sink, m, softmax_scale));
    if (lane == 0) static_cast<Accum*>(p.lse)[head.row(i)] = all.lse(m * softmax_scale);
    Element* out = head.sequence.queries<Element>(p.out, p.out_at, head.h) + i * p.out_at.n;
    for (int d0 = 0; d0 < p.Dv; d0 += COLUMNS_AT_A_TIME) {
        Accum totals[COLUMNS_OF_LANE] = {};
        for (int j0 = keys.lo; j0 < keys.hi; j0 += WARP) {
            const int j = j0 + lane;
            const Accum s = j < keys.hi ? head.score(i, j) : -infinity<Accum>();
            const bool kept = !HAS_DROPOUT || head.dropout.keeps(i, j);
            const Accum own = kept ? exp2_of(difference(s, m) * softmax_scale_log2) : Accum(0);
            for_each_attended(s != -infinity<Accum>(), own, [&](int other, Accum weight) {
                add_columns(totals, d0, p.Dv, weight, head.v + (j0 + other) * p.v_at.n);
            });
        }
        const Accum factor = Accum(p.dropout_scale) / all.total * all.rescale;
        for_columns(d0, p.Dv, [&](int n, i64 d) {
            out[d] = narrow<Element>(all.total == 0 ? Accum(0) : totals[n] * factor);
        });
    }
}

// Compute dq of query i.
__device__ inline void query_row(const Params& p, i64 b, i64 h, int i) {
    const Head head(p, b, h);
    const int lane = threadIdx.x % WARP;
    const Range keys = head.attn_mask.window.key_range(i, i + 1);
    Element* dq = head.sequence.queries<Element>(p.dq, p.dq_at, head.h) + i * p.dq_at.n;
    for (int d0 = 0; d0 < p.D; d0 += COLUMNS_AT_A_TIME) {
        Accum totals[COLUMNS_OF_LANE] = {};
        for (int j0 = keys.lo; j0 < keys.hi; j0 += WARP) {
            const int j = j0 + lane;
            const PairGradient pair =
                j < keys.hi ? pair_gradient(head, i, j) : PairGradient{false, 0, 0, 0};
            for_each_attended(pair.attended, pair.capped, [&](int other, Accum weight) {
                add_columns(totals, d0, p.D, weight, head.k + (j0 + other) * p.k_at.n);
            });
        }
        for_columns(d0, p.D, [&](int n, i64 d) { dq[d] = narrow<Element>(totals[n] * Accum(p.scale)); });
    }
}

// Compute dk and dv of key j of key head `kv`.
__device__ inline void key_row(const Params& p, i64 b, i64 kv, int j) {
    const int lane = threadIdx.x % WARP, group = int(p.group);
    const Sequence sequence(p, b);
    Element* dk = sequence.keys<Element>(p.dk, p.dk_at, kv) + j * p.dk_at.n;
    Element* dv = sequence.keys<Element>(p.dv, p.dv_at, kv) + j * p.dv_at.n;
    for (int d0 = 0; d0 < p.D || d0 < p.Dv; d0 += COLUMNS_AT_A_TIME) {
        Accum dk_totals[COLUMNS_OF_LANE] = {}, dv_totals[COLUMNS_OF_LANE] = {};
        for (int g = 0; g < group; ++g) {
            const Head head(p, b, kv * group + g);
            const Range queries = head.attn_mask.window.query_range(j, j + 1);
            for (int i0 = queries.lo; i0 < queries.hi; i0 += WARP) {
                const int i = i0 + lane;
                const PairGradient pair =
                    i < queries.hi ? pair_gradient(head, i, j) : PairGradient{false, 0, 0, 0};
                for_each_attended(pair.attended, pair.capped, [&](int other, Accum weight) {
                    add_columns(dk_totals, d0, p.D, weight, head.q + (i0 + other) * p.q_at.n);
                });
                for_each_attended(pair.attended, pair.p, [&](int other, Accum weight) {
                    add_columns(dv_totals, d0, p.Dv, weight, head.dout + (i0 + other) * p.dout_at.n);
                });
            }
        }
        for_columns(d0, p.D, [&](int n, i64 d) { dk[d] = narrow<Element>(dk_totals[n] * Accum(p.scale)); });
        for_columns(d0, p.Dv, [&](int n, i64 d) { dv[d] = narrow<Element>(dv_totals[n]); });
    }
}
