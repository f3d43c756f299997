// Backward pass on Hopper for head dimensions above 128: as backward_sm90.cu, but the accumulators
// of dK and dV of 64 keys fill the registers of a warpgroup each. So one warpgroup has dV, computes
// P and passes it to the other, which has dK and computes dS. Both compute a share of dQ from it.
// The NaN-safe variant is of the same shape.
#include "bwd_mainloop_sm90.cuh"

static_assert(IS_WIDE && CONSUMERS == 2 && BLOCK_Q == WARPGROUP_ROWS && HEAD_DIM % DQ_SLICE == 0);

constexpr int DV_WARPGROUP = 0, DK_WARPGROUP = 1;

// What P is where it is not attended to, NaN-safe: a probability is not negative.
constexpr Accum MASKED = -1;

// A warpgroup's share of dQ of a tile, one slice at a time, as there are registers for. In the end
// no GEMM is in flight, those issued before included.
template <int WARPGROUP_NUMBER>
__device__ inline void compute_dq(const Smem& smem, const KeyTile& k, int ds_stage, int row0,
                                  PipelineState<DQ_STAGES>& dq_pipe) {
    constexpr DqShare SHARE = dq_share(WARPGROUP_NUMBER);
#pragma unroll
    for (int n = SHARE.column; n < SHARE.column + SHARE.columns; n += DQ_SLICE) {
        Fragment<Accum, 1, DQ_SLICE / 8> dq;
        gemm_async_mn<Element>(dq, smem.ds(ds_stage), 0, k, n);
        warpgroup_wait<0>(dq);
        publish_dq(smem, WARPGROUP_NUMBER, dq, row0, dq_pipe);
    }
}

// The first query of the next tile, as far as `zero_past_end` asks: the last tile of all heads comes
// first.
__device__ inline int next_q0(const WorkTile& work, int heads, int h, int tile) {
    return (h + 1 < (work.kv + 1) * heads ? tile : tile - 1) * BLOCK_Q;
}
__device__ inline int first_q0(const Params& p, const WorkTile& work) {
    return PACKED ? QueryTileList(p, work).tile(work.tiles.end - 1) * BLOCK_Q : 0;
}

// The table of what was not finite in dO.
__device__ inline NonFiniteDout table_of(const Smem& smem,
                                         const PipelineState<DS_STAGES>& ds_pipe) {
    return {smem.ds(ds_pipe.next().stage).address};
}

// The warpgroup of dV.
__device__ __forceinline__ void consume_for_dv(const Params& p, const Smem& smem) {
    const int heads = int(p.group), row0 = threadIdx.x / WARP % 4 * 16;
    PipelineState<1> k_pipe, v_pipe;
    PipelineState<DQ_STAGES> dq_pipe;
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<DOUT_STAGES> dout_pipe;
    PipelineState<DS_STAGES> ds_pipe;
    WorkTile work{};
    int tile = 0, h = 0;
    TileScores s(0, 0);
    Fragment<Accum, 1, VT> dv;
    Operands probs;
    TileInputs inputs(smem);

    auto issue_s = [&](int q0) {
        const QueryTile q = smem.q(q_pipe.stage);
        smem.q_full(q_pipe.stage).wait(q_pipe.phase);
        zero_past_end<HEAD_DIM>(p, q, work, q0, DV_WARPGROUP);
        gemm_async<Element, HEAD_DIM>(s, smem.k(), 0, q);
    };
    // From S of tile j to S of tile j + 1, if there is `more`; k is held throughout:
    //
    //     step                       GEMMs in flight      stages held
    //     softmax, publish P of j    -                    q(j)
    //     issue dV of j              dV                   dO(j)
    //     issue S of j + 1, wait dV  S                    q(j + 1), dO(j)
    //     wait dS of j, dQ of j      S, dQ                q(j + 1), dS(j)
    //     wait S                     -                    q(j + 1)
    //
    // NaN-safe, S is not issued ahead: whether the tile is the last is known too late.
    auto step = [&](bool partial, bool more) {
        inputs.load(p, work.b, h, work.k0 + row0, tile * BLOCK_Q);
        if constexpr (NAN_SAFE) {
            issue_s(tile * BLOCK_Q);
            warpgroup_wait<0>(s);
        }
        const bool masked = NAN_SAFE && has_masked(p, work, tile, partial);
        const float* const lse_log2 = smem.storage.lse_log2[q_pipe.stage];
        s.row = work.k0 + row0, s.column = tile * BLOCK_Q;
        if constexpr (NAN_SAFE) {
            smem.dout_full(dout_pipe.stage).wait(dout_pipe.phase);
            const NonFiniteDout table = table_of(smem, ds_pipe);
            const bool non_finite =
                masked && clean_q_and_dout(smem, q_pipe.stage, dout_pipe.stage, table);
            recompute_p_nan_safe(p, work.sequence(p), h, masked, lse_log2, inputs, s, probs, non_finite,
                                 table, dv)
                .fill_others(s, MASKED);
        } else {
            recompute_p(p, work.sequence(p), h, partial, lse_log2, inputs, s, probs);
        }
        store_exchange(smem.p(), s);
        fence_async_shared();
        smem.p_full().arrive();
        // Safe: the GEMM of S is complete; and the lse is consumed, for the P made of it is stored,
        // with the proxy fence behind.
        smem.q_empty(q_pipe.stage).arrive();
        q_pipe.advance();
        const DoutTile dout = smem.dout(dout_pipe.stage);
        smem.dout_full(dout_pipe.stage).wait(dout_pipe.phase);
        zero_past_end<VALUE_DIM>(p, dout, work, tile * BLOCK_Q, DV_WARPGROUP);
        gemm_async<Element>(dv, probs, dout);
        if (!NAN_SAFE && more) {
            issue_s(next_q0(work, heads, h, tile));
            warpgroup_wait<1>(dv);
        } else {
            warpgroup_wait<0>(dv);
        }
        smem.dout_empty(dout_pipe.stage).arrive();  // safe: only dV's GEMM read it here
        dout_pipe.advance();
        // Once dS is full, the other warpgroup has read P, too.
        smem.ds_full(ds_pipe.stage).wait(ds_pipe.phase);
        compute_dq<DV_WARPGROUP>(smem, k_of_dq(smem, masked), ds_pipe.stage, row0, dq_pipe);
        ds_pipe.advance();
        if (!NAN_SAFE && more) warpgroup_wait<0>(s);
    };

    for (;;) {
        smem.k_full().wait(k_pipe.phase);
        k_pipe.advance();
        work = smem.storage.work_tile;
        if (work.is_end) break;
        dv.clear();
        if (work.tiles.begin < work.tiles.end) {
            zero_unattended(p, smem, work, v_pipe.phase);
            v_pipe.advance();
            if constexpr (NAN_SAFE) {
                clean_k(smem);
            } else {
                issue_s(first_q0(p, work));
                warpgroup_wait<0>(s);
            }
            for_each_tile<false, !NAN_SAFE>(p, work, heads, h, tile, step);
        }
        // Safe: all GEMMs that read k are complete, and the steps have consumed the work tile.
        smem.k_empty().arrive();
        if constexpr (HAS_DROPOUT) dv.scale(Accum(p.dropout_scale));
        flag_non_finite(p, work, dv);
        store_gradient(p, smem, p.dv, p.dv_at, int(p.Dv), work, row0, dv, ds_pipe);
    }
}

// The warpgroup of dK.
__device__ __forceinline__ void consume_for_dk(const Params& p, const Smem& smem) {
    const int heads = int(p.group), row0 = threadIdx.x / WARP % 4 * 16;
    PipelineState<1> k_pipe, v_pipe, p_pipe;
    PipelineState<DQ_STAGES> dq_pipe;
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<DOUT_STAGES> dout_pipe;
    PipelineState<DS_STAGES> ds_pipe;
    WorkTile work{};
    int tile = 0, h = 0;
    Fragment<Accum, 1, QT> dp;
    Fragment<Accum, 1, DT> dk;
    Operands ds;

    auto issue_dp = [&](int q0) {
        const DoutTile dout = smem.dout(dout_pipe.stage);
        smem.dout_full(dout_pipe.stage).wait(dout_pipe.phase);
        zero_past_end<VALUE_DIM>(p, dout, work, q0, DK_WARPGROUP);
        gemm_async<Element, VALUE_DIM>(dp, smem.v(), 0, dout);
    };
    // From dP of tile j to dP of tile j + 1, if there is `more`; v is held until the last dP, k
    // throughout:
    //
    //     step                       GEMMs in flight      stages held
    //     wait dP                    -                    dO(j)
    //     wait P, publish dS of j    -                    dO(j), P(j); then dS(j)
    //     issue dK of j              dK                   q(j), dS(j)
    //     dQ of j                    dK, dQ               q(j), dS(j)
    //     issue dP of j + 1          dP                   dO(j + 1)
    //
    // The other warpgroup computes the next P meanwhile. NaN-safe, dP is issued here.
    auto step = [&](bool partial, bool more) {
        const bool masked = NAN_SAFE && has_masked(p, work, tile, partial);
        if constexpr (NAN_SAFE) issue_dp(tile * BLOCK_Q);
        warpgroup_wait<0>(dp);
        if (masked) {
            smem.q_full(q_pipe.stage).wait(q_pipe.phase);
            clean_q_and_dout(smem, q_pipe.stage, dout_pipe.stage, table_of(smem, ds_pipe));
        }
        // Safe: only GEMMs read v, and the last is complete.
        if (!more) smem.v_empty().arrive();
        {
            Fragment<Accum, 1, QT> s;
            smem.p_full().wait(p_pipe.phase);
            p_pipe.advance();
            load_exchange(s, smem.p());
            compute_ds(smem.storage.delta[dout_pipe.stage], Accum(p.dropout_scale), dp, s);
            if constexpr (NAN_SAFE)
#pragma unroll
                for (int n = 0; n < QT; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (s.x[0][n][e] == MASKED) dp.x[0][n][e] = 0;
        }
        convert(ds, dp);
        // The stage is two tiles old. This warpgroup's GEMMs that read it were complete before it
        // published the last dS, those of the other one before that published this P.
        static_assert(DS_STAGES == 2, "a stage two tiles old is overwritten without a wait");
        store_transposed<Element>(smem.ds(ds_pipe.stage), ds, row0);
        fence_async_shared();
        smem.ds_full(ds_pipe.stage).arrive();
        // Safe: dP's GEMM is complete; and delta is consumed, for the dS made of it is stored, with
        // the proxy fence behind.
        smem.dout_empty(dout_pipe.stage).arrive();
        dout_pipe.advance();
        const QueryTile q = smem.q(q_pipe.stage);
        smem.q_full(q_pipe.stage).wait(q_pipe.phase);
        zero_past_end<HEAD_DIM>(p, q, work, tile * BLOCK_Q, DK_WARPGROUP);
        gemm_async<Element>(dk, ds, q);
        smem.ds_full(ds_pipe.stage).wait(ds_pipe.phase);
        compute_dq<DK_WARPGROUP>(smem, k_of_dq(smem, masked), ds_pipe.stage, row0, dq_pipe);
        warpgroup_wait<0>(dk);
        smem.q_empty(q_pipe.stage).arrive();  // safe: only dK's GEMM read it here
        q_pipe.advance();
        ds_pipe.advance();
        if (!NAN_SAFE && more) issue_dp(next_q0(work, heads, h, tile));
    };

    for (;;) {
        smem.k_full().wait(k_pipe.phase);
        k_pipe.advance();
        work = smem.storage.work_tile;
        if (work.is_end) break;
        dk.clear();
        if (work.tiles.begin < work.tiles.end) {
            zero_unattended(p, smem, work, v_pipe.phase);
            if constexpr (NAN_SAFE) clean_k(smem);
            smem.v_full().wait(v_pipe.phase);
            v_pipe.advance();
            if constexpr (!NAN_SAFE) issue_dp(first_q0(p, work));
            for_each_tile<false, !NAN_SAFE>(p, work, heads, h, tile, step);
            if constexpr (NAN_SAFE)
                smem.v_empty().arrive();  // safe: the last step waited for all GEMMs
        }
        // Safe: all GEMMs that read k are complete, and the steps have consumed the work tile.
        smem.k_empty().arrive();
        flag_non_finite(p, work, dk);
        dk.scale(Accum(p.scale));
        store_gradient(p, smem, p.dk, p.dk_at, int(p.D), work, row0, dk, ds_pipe);
    }
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    backward_wide_sm90(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    run_backward(p, maps, [&](const Smem& smem, int warpgroup) {
        if (warpgroup == DV_WARPGROUP)
            consume_for_dv(p, smem);
        else
            consume_for_dk(p, smem);
    });
}
