// Backward pass for k and v on Hopper, for head dimensions above 128: as backward_sm90.cu, but the
// accumulators of dK or of dV for 64 keys fill the registers of a warpgroup. So one warpgroup accumulates
// dV: it computes P and passes it to the other, which accumulates dK and computes dS. No registers are left
// for dQ, which backward_wide_dq_sm90.cu computes.
//
// Above 256 columns a cluster of two CTAs shares a work tile (pair_sm90.cuh). They exchange parts of S during
// the GEMM of dV, and P during the GEMM of the next S; parts of dP and dS likewise.
#include "bwd_mainloop_sm90.cuh"

static_assert(!SPLIT_Q && IS_WIDE && CONSUMERS == 2 && BLOCK_Q == WARPGROUP_ROWS);

constexpr int DV_WARPGROUP = 0, DK_WARPGROUP = 1;
constexpr int OWN_QUERIES = BLOCK_Q / SHARES;  // of a tile, whose scores this CTA finishes
using TileOperands = Atom<Element>::A[BLOCK_Q / 16];  // P or dS of all queries of a tile

// The first query of the next step's tile. `zero_past_end` needs it, for packed sequences: there a tile of
// all heads comes before the next tile.
static_assert(!(PACKED && HEAD_MAJOR));
__device__ inline int next_q0(const WorkTile& work, int heads, int h, int tile) {
    return (h + 1 < (work.kv + 1) * heads ? tile : work.tiles.next(tile)) * BLOCK_Q;
}
__device__ inline int first_q0(const Params& p, const WorkTile& work) {
    return PACKED ? QueryTileList(p, work).tile(work.tiles.first) * BLOCK_Q : 0;
}

// The warpgroup of dV.
__device__ __forceinline__ void consume_for_dv(const Params& p, const Smem& smem) {
    const int heads = int(p.group), row0 = threadIdx.x / WARP % 4 * 16;
    PipelineState<1> k_pipe, v_pipe;
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<DOUT_STAGES> dout_pipe;
    PipelineState<P_STAGES> p_pipe;
    WorkTile work{};
    int tile = 0, h = 0;
    TileScores s(0, 0);
    Fragment<Accum, 1, SHARES * QT> s_parts;
    Fragment<Accum, 1, VT> dv;
    TileOperands probs;
    TileInputs inputs(smem);
    Exchange s_exchange(smem.p(0), smem.storage.s_exchange);
    Exchange p_exchange(smem.peer_p(), smem.storage.p_exchange);

    auto issue_s = [&](int q0) {
        const QueryTile q = smem.q(q_pipe.stage);
        smem.q_full(q_pipe.stage).wait(q_pipe.phase);
        zero_past_end<HEAD_COLUMNS>(p, q, work, q0, DV_WARPGROUP);
        gemm_async<Element, HEAD_COLUMNS>(accumulators(s, s_parts), smem.k(), 0, q);
    };
    auto issue_dv = [&] {
        const DoutTile dout = smem.dout(dout_pipe.stage);
        smem.dout_full(dout_pipe.stage).wait(dout_pipe.phase);
        zero_past_end<VALUE_COLUMNS>(p, dout, work, tile * BLOCK_Q, DV_WARPGROUP);
        gemm_async<Element>(dv, probs, dout);
    };
    auto release_dout = [&] {
        smem.dout_empty(dout_pipe.stage).arrive();  // safe: only dV's GEMM read it here
        dout_pipe.advance();
    };
    // From S of tile j to S of tile j + 1, if there is `more`; k is held throughout:
    //
    //     step                       GEMMs in flight      stages held
    //     softmax, publish P of j    -                    q(j)
    //     issue dV of j              dV                   dO(j)
    //     issue S of j + 1, wait dV  S                    q(j + 1), dO(j)
    //     wait S                     -                    q(j + 1)
    //
    // Paired CTAs issue S of j + 1 before dV of j.
    auto step = [&](bool partial, bool more) {
        // The dK warpgroup releases this tile, once it has used P.
        if constexpr (PAIR) s_exchange.add(s);
        const int own = OWN_QUERIES * own_half();
        inputs.load(p, work.b, h, work.k0 + row0, tile * BLOCK_Q + own);
        s.row = work.k0 + row0, s.column = tile * BLOCK_Q + own;
        recompute_p(p, work.sequence(p), h, partial, smem.storage.lse_log2[q_pipe.stage] + own,
                    inputs, s, own_operands<QT / 2>(probs));
        fence_async_shared();  // for lse; after the stores of P it would wait for them
        // In paired CTAs each thread replaces what it has added to S by its P.
        if constexpr (!PAIR) smem.p_empty(p_pipe.stage).wait(p_pipe.phase ^ 1);
        store_exchange(smem.p(p_pipe.stage), s);
        smem.p_full(p_pipe.stage).arrive();
        p_pipe.advance();
        // Safe: the GEMM of S is complete. lse has been used: P, computed from it, is stored.
        smem.q_empty(q_pipe.stage).arrive();
        q_pipe.advance();
        if constexpr (PAIR) {
            p_exchange.send(own_operands<QT / 2>(probs));
            if (more) issue_s(next_q0(work, heads, h, tile));
            p_exchange.receive(probs);
            p_exchange.release();
            issue_dv();
            if (more) warpgroup_wait<1>(s_parts), s_exchange.send(s_parts, s);
            warpgroup_wait<0>(dv);
            release_dout();
        } else {
            issue_dv();
            if (more) {
                issue_s(next_q0(work, heads, h, tile));
                warpgroup_wait<1>(dv);
            } else {
                warpgroup_wait<0>(dv);
            }
            release_dout();
            if (more) warpgroup_wait<0>(s);
        }
    };

    for (;;) {
        smem.k_full().wait(k_pipe.phase);
        k_pipe.advance();
        work = smem.storage.work_tile;
        if (work.is_end) break;
        dv.clear();
        if (!work.tiles.is_empty()) {
            zero_unattended(p, smem, work, v_pipe.phase);
            v_pipe.advance();
            issue_s(first_q0(p, work));
            warpgroup_wait<0>(accumulators(s, s_parts));
            if constexpr (PAIR) s_exchange.send(s_parts, s);
            for_each_tile<false, true>(p, work, h, tile, step);
        }
        // Safe: all GEMMs that read k are complete, and the steps have read the work tile.
        smem.k_empty().arrive();
        if constexpr (SCALES_DV) dv.scale(dv_scale(p));
        flag_non_finite(p, work, dv);
        store_gradient(p, smem, p.dv, p.dv_at, int(p.Dv), work, row0, dv, {});
    }
}

// The warpgroup of dK.
__device__ __forceinline__ void consume_for_dk(const Params& p, const Smem& smem) {
    const int heads = int(p.group), row0 = threadIdx.x / WARP % 4 * 16;
    PipelineState<1> k_pipe, v_pipe;
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<DOUT_STAGES> dout_pipe;
    PipelineState<P_STAGES> p_pipe;
    WorkTile work{};
    int tile = 0, h = 0;
    Fragment<Accum, 1, QT> dp;
    Fragment<Accum, 1, SHARES * QT> dp_parts;
    Fragment<Accum, 1, DT> dk;
    TileOperands ds;
    const Exchange s_exchange(smem.p(0), smem.storage.s_exchange);
    Exchange dp_exchange(smem.peer_dp(), smem.storage.dp_exchange);

    auto issue_dp = [&](int q0) {
        const DoutTile dout = smem.dout(dout_pipe.stage);
        smem.dout_full(dout_pipe.stage).wait(dout_pipe.phase);
        zero_past_end<VALUE_COLUMNS>(p, dout, work, q0, DK_WARPGROUP);
        gemm_async<Element, VALUE_COLUMNS>(accumulators(dp, dp_parts), smem.v(), 0, dout);
    };
    auto issue_dk = [&] {
        const QueryTile q = smem.q(q_pipe.stage);
        smem.q_full(q_pipe.stage).wait(q_pipe.phase);
        zero_past_end<HEAD_COLUMNS>(p, q, work, tile * BLOCK_Q, DK_WARPGROUP);
        gemm_async<Element>(dk, ds, q);
    };
    auto release_q = [&] {
        smem.q_empty(q_pipe.stage).arrive();  // safe: only dK's GEMM read it here
        q_pipe.advance();
    };
    // From dP of tile j to dP of tile j + 1, if there is `more`; v is held until the last dP, k
    // throughout:
    //
    //     step                       GEMMs in flight      stages held
    //     wait P, dS of j            -                    dO(j), P(j)
    //     issue dK of j              dK                   q(j)
    //     issue dP of j + 1, wait dK dP                   q(j), dO(j + 1)
    //     wait dP                    -                    dO(j + 1)
    //
    // Paired CTAs issue dP of j + 1 before dK of j.
    auto step = [&](bool, bool more) {
        if constexpr (PAIR) dp_exchange.add(dp), dp_exchange.release();
        // Safe: only GEMMs read v, and the last is complete.
        if (!more) smem.v_empty().arrive();
        {
            Fragment<Accum, 1, QT> s;
            smem.p_full(p_pipe.stage).wait(p_pipe.phase);
            load_exchange(s, smem.p(p_pipe.stage));
            const float* const deltas = smem.storage.delta[dout_pipe.stage];
            compute_ds(deltas + OWN_QUERIES * own_half(), Accum(p.dropout_scale), dp, s);
        }
        convert(own_operands<QT / 2>(ds), dp);
        // Safe: P and delta have been used by dS. Generic stores overwrite P, which need no fence; delta is
        // fenced below. The GEMM of dP is complete.
        if constexpr (PAIR)
            s_exchange.release();
        else
            smem.p_empty(p_pipe.stage).arrive();
        p_pipe.advance();
        fence_async_shared();
        smem.dout_empty(dout_pipe.stage).arrive();
        dout_pipe.advance();
        if constexpr (PAIR) {
            dp_exchange.send(own_operands<QT / 2>(ds));
            if (more) issue_dp(next_q0(work, heads, h, tile));
            dp_exchange.receive(ds);
            dp_exchange.release();
            issue_dk();
            if (more) warpgroup_wait<1>(dp_parts), dp_exchange.send(dp_parts, dp);
            warpgroup_wait<0>(dk);
            release_q();
        } else {
            issue_dk();
            if (more) {
                issue_dp(next_q0(work, heads, h, tile));
                warpgroup_wait<1>(dk);
            } else {
                warpgroup_wait<0>(dk);
            }
            release_q();
            if (more) warpgroup_wait<0>(dp);
        }
    };

    for (;;) {
        smem.k_full().wait(k_pipe.phase);
        k_pipe.advance();
        work = smem.storage.work_tile;
        if (work.is_end) break;
        dk.clear();
        if (!work.tiles.is_empty()) {
            zero_unattended(p, smem, work, v_pipe.phase);
            smem.v_full().wait(v_pipe.phase);
            v_pipe.advance();
            issue_dp(first_q0(p, work));
            warpgroup_wait<0>(accumulators(dp, dp_parts));
            if constexpr (PAIR) dp_exchange.send(dp_parts, dp);
            for_each_tile<false, true>(p, work, h, tile, step);
        }
        smem.k_empty().arrive();  // safe: the steps have read the work tile
        flag_non_finite(p, work, dk);
        dk.scale(Accum(p.scale));
        store_gradient(p, smem, p.dk, p.dk_at, int(p.D), work, row0, dk, {});
    }
}

extern "C" __global__ void CLUSTER __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    backward_wide_sm90(const __grid_constant__ Params p, const __grid_constant__ BackwardMaps maps) {
    run_backward(p, maps, [&](const Smem& smem, int warpgroup) {
        if (warpgroup == DV_WARPGROUP)
            consume_for_dv(p, smem);
        else
            consume_for_dk(p, smem);
    });
}
