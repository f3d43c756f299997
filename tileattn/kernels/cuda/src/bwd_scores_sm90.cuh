// Layer 3. Softmax of Hopper's backward kernels, in fragments: from S^T to P and from dP to dS, for 64
// keys and a tile of queries. Then the same, NaN-safe.
#pragma once

#include "bwd_smem_sm90.cuh"
#include "gradient.cuh"
#include "split_gemm_sm90.cuh"

constexpr int DT = HEAD_COLUMNS / 8, VT = VALUE_COLUMNS / 8;

using TileScores = Scores<true, 1, QT>;
// Columns of atoms whose scores are recomputed at a time. score_mod, mask_mod, dropout and a bias need registers. Split
// float32 leaves some in narrow heads.
constexpr bool NEEDS_REGISTERS = HAS_SCORE_GRAD || HAS_MASK_MOD || HAS_DROPOUT ||
                                 (SPLIT_FLOATS ? VALUE_DIM > 64 && (HAS_BIAS || HAS_ALIBI) : HAS_BIAS);
constexpr int CHUNK = NEEDS_REGISTERS ? 2 : QT;
constexpr bool CHUNKED = CHUNK < QT;
// P or dS as an operand of dV or dK.
template <bool>
struct OperandsOf {
    using Type = Atom<Element>::A[QT / 2];
};
template <>
struct OperandsOf<true> {
    using Type = SplitOperand<QT / 2>;
};
using Operands = OperandsOf<SPLIT_FLOATS>::Type;

// True if dS uses the rounded P of dV, to save registers.
constexpr bool P_IS_ROUNDED = DQ_IS_TRANSPOSED || DQ_BESIDE_DP;

// P of an element, from float or from a rounded operand.
__device__ inline Accum element(const Fragment<Accum, 1, QT>& p, int n, int e) { return p.x[0][n][e]; }
template <class T = Element>
__device__ inline Accum element(const Operands& p, int n, int e) {
    const u32 two = p[n / 2].r[n % 2 * 2 + e / 2];
    return widen(T{static_cast<unsigned short>(e % 2 ? two >> 16 : two)});
}

template <int K>
__device__ inline void convert(typename Atom<Element>::A (&operands)[K], const Fragment<Accum, 1, QT>& c,
                               int begin = 0, int end = QT) {
#pragma unroll
    for (int i = begin / 2; i < end / 2; ++i) operands[i] = Atom<Element>::a_of(c.x[0] + 2 * i);
}
template <int K>
__device__ inline void convert(SplitOperand<K>& operands, const Fragment<Accum, 1, QT>& c, int begin = 0,
                               int end = QT) {
    operands.split(c, {SPLIT_P, SPLIT_P}, begin, end);
}

// The logsumexp of a lane's queries. If dK is complete before the softmax, there are registers for it: then
// it is read while S is computed.
struct TileLse {
    static constexpr bool IS_HELD = DQ_BESIDE_DP;
    const float* row;
    float2 held[IS_HELD ? QT : 1];

    __device__ TileLse(const float* lse_log2) : row(lse_log2) {
        if constexpr (IS_HELD)
#pragma unroll
            for (int n = 0; n < QT; ++n) held[n] = load(n);
    }
    __device__ float2 load(int n) const {
        return *reinterpret_cast<const float2*>(row + Lane().column(0) + 8 * n);
    }
    __device__ float2 operator[](int n) const { return IS_HELD ? held[n] : load(n); }
};

// From S to P, with the logsumexp of the tile's queries.
__device__ inline void exponentiate(const ScoreMod& score_mod, const TileLse& lse_log2, TileScores& s,
                                    int begin, int end) {
    const Accum softmax_scale_log2 = score_mod.softmax_scale_log2();
#pragma unroll
    for (int n = begin; n < end; ++n) {
        const float2 lse = lse_log2[n];
#pragma unroll
        for (int e = 0; e < 4; ++e)
            s.x[0][n][e] =
                exp2_of(exponent(s.x[0][n][e], softmax_scale_log2, e % 2 ? lse.y : lse.x));
    }
}

// Derivatives of the softcap and of score_mod at the scores.
using ScoreSlopes = Fragment<Accum, 1, HAS_SCORE_GRAD ? QT : 1>;

// Dropped elements of P are marked for dS: by the sign, which is cheapest. If P is multiplied by
// derivatives, which have signs, they are marked by the lowest bit.
__device__ inline Accum marked(Accum p) {
    return HAS_SCORE_GRAD ? __uint_as_float(__float_as_uint(p) | 1) : -p;
}
__device__ inline Accum unmarked(Accum p) {
    return HAS_SCORE_GRAD ? __uint_as_float(__float_as_uint(p) & ~1u) : p;
}
__device__ inline bool is_marked(Accum p) {
    return HAS_SCORE_GRAD ? __float_as_uint(p) & 1 : p < 0;
}

// For each dropped element of some columns of atoms: zero it in `kept` (NaN stays NaN), mark it in s, and
// call record(m, n, e).
template <class Record>
__device__ inline void drop(const Dropout& dropout, TileScores& s, Fragment<Accum, 1, QT>& kept,
                            int begin, int end, Record record) {
    auto visit = [&](int m, int n, int e, bool keeps) {
        Accum& x = s.x[m][n][e];
        x = keeps ? unmarked(x) : marked(x);
        if (keeps) return;
        kept.x[m][n][e] *= 0;
        record(m, n, e);
    };
    if constexpr (HAS_DROPOUT)
#pragma unroll
        for (int n = begin; n < end; n += 2)
            dropout.for_columns<true, 1>(s.row, s.column, n, visit);
}

// The other inputs of a tile of scores: its dense mask, in registers, and its bias, in shared memory.
struct TileInputs {
    const Smem& smem;
    DenseMask<true, 1, QT> dense;
    TileBias bias;
    PipelineState<1> bias_pipe;

    __device__ explicit TileInputs(const Smem& smem) : smem(smem), bias(smem.bias()) {}

    // Start to load the mask of keys from k0 and queries from q0 on.
    __device__ void load(const Params& p, int b, int h, int k0, int q0) {
        if constexpr (HAS_MASK) dense.load(AttentionMask(p, b, h), k0, q0);
        if constexpr (SPLIT_FLOATS) bias.load(ScoreMod(p, b, h), k0, q0);
    }
    __device__ void wait_for_bias() const {
        if constexpr (BIAS_IS_LOADED) smem.bias_full().wait(bias_pipe.phase);
    }
    // Safe once the bias is added to the scores: its values have been used. The copies that overwrite it
    // are generic stores, which the arrive orders after the reads.
    __device__ void release_bias() {
        if constexpr (BIAS_IS_LOADED) smem.bias_empty().arrive(), bias_pipe.advance();
    }
};

// From K Q^T to P: `probs` becomes P as an operand of dV, and s becomes P times the derivatives of the
// score modifiers, for dS.
__device__ inline void recompute_p(const Params& p, const Sequence& sequence, int h,
                                   bool partial, const TileLse& lse_log2, TileInputs& inputs, TileScores& s,
                                   Operands& probs) {
    const int b = int(sequence.b);
    const ScoreMod score_mod(p, b, h);
    const SlidingWindow& window = inputs.smem.storage.work_tile.window;
    const Dropout dropout(p, b, h);
    ScoreSlopes slopes;
    slopes.clear();
    auto finish = [&](int begin, int end) {
        exponentiate(score_mod, lse_log2, s, begin, end);
        Fragment<Accum, 1, QT> kept = s;
        if constexpr (HAS_SCORE_GRAD)
            s.for_each([&](Accum& x, int, int, int, int n, int e) { x *= slopes.x[0][n][e]; },
                       begin, end);
        drop(dropout, s, kept, begin, end, [](int, int, int) {});
        convert(probs, kept, begin, end);
    };
    inputs.wait_for_bias();
#pragma unroll
    for (int n = 0; n < QT; n += CHUNK) {
        begin_chunk<CHUNKED>(s);
        auto record = [&](int, int n, int e, Accum dsoftcap, Accum dfunction) {
            if constexpr (HAS_SCORE_GRAD) slopes.x[0][n][e] = dsoftcap * dfunction;
        };
        s.apply(score_mod, inputs.bias, record, n, n + CHUNK);
        if (partial)
            s.masked_fill_positions(AttentionMask(p, sequence, window, h), n, n + CHUNK);
        if constexpr (!HAS_MASK) finish(n, n + CHUNK);
        end_chunk<CHUNKED>(s, n + CHUNK, -infinity<Accum>());
    }
    inputs.release_bias();
    if constexpr (HAS_MASK) {
        inputs.dense.share();
        s.masked_fill(inputs.dense);
        finish(0, QT);
    }
}

// From dP to dS, with P and delta of the tile's queries, for columns of atoms begin to end - 1.
template <class Probs>
__device__ inline void compute_ds(const float* deltas, Accum dropout_scale,
                                  Fragment<Accum, 1, QT>& dp, const Probs& p,
                                  int begin = 0, int end = QT) {
    const Lane lane;
#pragma unroll
    for (int n = begin; n < end; ++n) {
        const float2 delta = *reinterpret_cast<const float2*>(deltas + lane.column(0) + 8 * n);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const Accum own = element(p, n, e);
            Accum& x = dp.x[0][n][e];
            if constexpr (HAS_DROPOUT) x = is_marked(own) ? Accum(0) : x * dropout_scale;
            const Accum size = HAS_DROPOUT && !HAS_SCORE_GRAD ? fabs(own) : own;
            x = score_gradient(size, x, e % 2 ? delta.y : delta.x);
        }
    }
}

// --- NaN-safe, as explained in nonfinite.cuh ----------------------------------------------------------

// With derivatives, values of q and k that are not finite would have to be restored, too.
static_assert(!(NAN_SAFE && HAS_SCORE_GRAD), "gradients where the scores are flat are not NaN");

using NonFiniteDout = NonFinite<Element, BLOCK_Q, VALUE_DIM>;
static_assert(NonFiniteDout::BYTES <= ScoreTile::BYTES, "the table takes a stage of dS");

// True if a tile has a masked-out pair. Queries past the end are zero, and attend to nothing.
__device__ inline bool has_masked(const Params& p, const WorkTile& work, int tile, bool partial) {
    return HAS_MASK || partial || (tile + 1) * BLOCK_Q > work.Nq(p);
}

// Copy k, with zeros instead of values that are not finite.
__device__ inline void clean_k(const Smem& smem) {
    sync_consumers();  // all GEMMs that read the previous copy are complete
    // Also copy the zeros after the last column: the GEMM of dQ reads whole slices.
    constexpr int COLUMNS = KeyTile::SLICES * KeyTile::WIDTH;
    zero_non_finite<Element, BLOCK_K, COLUMNS, WARPS_M, false>(smem.clean_k(), smem.k(),
                                                               threadIdx.x / WARP);
    fence_async_shared();
    sync_consumers();
}

// The k that the GEMM of dQ reads.
__device__ inline KeyTile k_of_dq(const Smem& smem, bool masked) {
    return NAN_SAFE && masked ? smem.clean_k() : smem.k();
}

// Zero the non-finite values of a tile of q and of dO, and record dO's in the table. Returns
// true if dO had any. The fence orders these stores before the next TMA loads into the stages.
__device__ inline bool clean_q_and_dout(const Smem& smem, int q_stage, int dout_stage,
                                        const NonFiniteDout& table) {
    // The scores are complete. So is the GEMM that read the stage of dS, where the table is stored.
    sync_consumers();
    const int warp = threadIdx.x / WARP;
    const QueryTile q = smem.q(q_stage);
    zero_non_finite<Element, BLOCK_Q, HEAD_DIM, WARPS_M, true>(q, q, warp);
    const bool any = table.template clean<WARPS_M>(smem.dout(dout_stage), warp);
    // Through memory: the warpgroups may call this from two places in the code.
    u32* const found = smem.storage.found;
    if (threadIdx.x % WARP == 0) found[warp] = any;
    fence_async_shared();
    sync_consumers();
    return __any_sync(~0u, found[threadIdx.x % WARPS_M]);
}

// From K Q^T to P, 0 for masked-out pairs, and to operands of dV. If `non_finite`, add to dV the values
// that were taken out of dO.
template <int NT>
__device__ inline Attended<1, QT> recompute_p_nan_safe(const Params& p, const Sequence& sequence,
                                                       int h, bool masked, const TileLse& lse_log2, TileInputs& inputs,
                                                       TileScores& s, Operands& probs,
                                                       bool non_finite,
                                                       const NonFiniteDout& table,
                                                       Fragment<Accum, 1, NT>& dv) {
    const int b = int(sequence.b);
    const ScoreMod score_mod(p, b, h);
    s.apply(score_mod, inputs.bias, [](int, int, int, Accum, Accum) {});
    if (masked) s.masked_fill_positions(AttentionMask(p, sequence, h));
    if constexpr (HAS_MASK) inputs.dense.share(), s.masked_fill(inputs.dense);
    Attended<1, QT> attended;
    attended.mark(s);
    exponentiate(score_mod, lse_log2, s, 0, QT);
    attended.fill_others(s, 0);
    Fragment<Accum, 1, QT> kept = s;
    Attended<1, QT> not_dropped = attended;
    drop(Dropout(p, b, h), s, kept, 0, QT, [&](int m, int n, int e) { not_dropped.drop(m, n, e); });
    convert(probs, kept);
    if (__any_sync(~0u, non_finite))
        add_non_finite(dv, table, 0,
                       [&](int m, int half, int w) { return not_dropped.word(m, half, w); });
    return attended;
}
