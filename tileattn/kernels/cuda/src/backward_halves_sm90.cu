// Backward pass on Hopper for q and k wider than 128 and v up to 128: as backward_sm90.cu, but dK and dV
// leave registers only for half of dP, and none for the scores of the next tile. So a tile is computed in
// two halves: the GEMMs of one half overlap with the softmax of the other, and with the other warpgroup. A
// dQ tile sums over 128 keys, so it is added half as often as with the 64 keys of backward_wide_sm90.cu.
#include "bwd_mainloop_sm90.cuh"

static_assert(IN_HALVES && BLOCK_Q == WARPGROUP_ROWS);
static_assert(!HAS_SCORE_GRAD && !HAS_ALIBI && !HAS_BIAS && !HAS_MASK && !HAS_DROPOUT && !SPLIT_Q,
              "these need registers");

constexpr int HALF = QT / 2;  // of a tile, in atoms: half of its queries

// A consumer warpgroup.
__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    const int row0 = threadIdx.x / WARP * 16, keys0 = WARPGROUP_ROWS * warpgroup;
    const DqShare share = dq_share(warpgroup);
    PipelineState<1> k_pipe, v_pipe;
    PipelineState<Q_STAGES> pipe;  // of q and of dO
    PipelineState<DS_STAGES> ds_pipe;
    PipelineState<DQ_STAGES> dq_pipe;

    const WorkTile& work = smem.storage.work_tile;  // read again each time, to save registers
    int tile = 0, h = 0;
    TileScores s(0, 0);
    Fragment<Accum, 1, QT> dp;
    Fragment<Accum, 1, DT> dk;
    Fragment<Accum, 1, VT> dv;
    Fragment<Accum, 1, DQ_COLUMNS / 8> dq;
    Operands probs, ds;
    TileInputs inputs(smem);  // has no mask and no bias, but Scores::apply takes one

    auto issue_s = [&](bool partial) {
        const QueryTile q = smem.q(pipe.stage);
        smem.q_full(pipe.stage).wait(pipe.phase);
        if (partial) zero_past_end<HEAD_DIM>(p, q, work, tile * BLOCK_Q, warpgroup);
        gemm_async<Element, HEAD_DIM>(s, smem.k(), keys0, q);
    };
    // From S to P, for the half that begins with atom n.
    auto softmax = [&](int n) {
        exponentiate(ScoreMod(p, work.b, h), smem.storage.lse_log2[pipe.stage], s, n, n + HALF);
    };
    auto issue_dv = [&](int n) {
        convert(probs, s, n, n + HALF);
        gemm_async<Element>(dv, probs, smem.dout(pipe.stage), n / 2, (n + HALF) / 2);
    };
    auto issue_dp = [&](int n) {
        gemm_async<Element, VALUE_DIM>(atoms<HALF>(dp, n), smem.v(), keys0, smem.dout(pipe.stage),
                                       8 * n);
    };
    auto finish_ds = [&](int n) {
        compute_ds(smem.storage.delta[pipe.stage], Accum(p.dropout_scale), dp, s, n, n + HALF);
        convert(ds, dp, n, n + HALF);
    };
    auto store_ds = [&](int n) {
        store_transposed<Element>(smem.ds(ds_pipe.stage), ds, row0, n / 2, (n + HALF) / 2);
    };
    auto issue_dk = [&](int n) {
        gemm_async<Element>(dk, ds, smem.q(pipe.stage), n / 2, (n + HALF) / 2);
    };
    auto publish_ds = [&] {
        fence_async_shared();
        smem.ds_full(ds_pipe.stage).arrive();
    };
    // Compute dQ of the tile from dS of all keys, and publish it.
    auto add_dq = [&](bool masked) {
        gemm_async_mn<Element>(dq, smem.ds(ds_pipe.stage), share.row, k_of_dq(smem, masked),
                               share.column, share.second);
        warpgroup_wait<0>(dq);
        // Safe: only dQ's GEMM reads the stage, and it is complete.
        smem.ds_empty(ds_pipe.stage).arrive();
        ds_pipe.advance();
        publish_dq(smem, warpgroup, dq, row0 % WARPGROUP_ROWS, dq_pipe);
        pipe.advance();
    };
    // A tile; k and v are held throughout:
    //
    //     step                           GEMMs in flight      stages held
    //     issue S, first half of dP      S, dP                q, dO
    //     wait S, softmax                dP                   q, dO
    //     issue first half of dV         dP, dV               q, dO
    //     wait dP, dS of the first half  dV                   q, dO
    //     issue second half of dP, dV    dP, dV               q, dO
    //     issue first half of dK         dP, dV, dK           q, dO
    //     wait dP, publish dS            dV, dK               q, dO, dS
    //     issue second half of dK        dK                   q, dS
    //     wait dS of all keys, dK        -                    dS
    //     dQ                             dQ                   dS
    //     publish dQ                     -                    -
    auto step = [&](bool partial, bool) {
        issue_s(partial);
        smem.dout_full(pipe.stage).wait(pipe.phase);
        if (partial)
            zero_past_end<VALUE_DIM>(p, smem.dout(pipe.stage), work, tile * BLOCK_Q, warpgroup);
        issue_dp(0);
        warpgroup_wait<1>(s);
        s.apply(ScoreMod(p, work.b, h), inputs.bias, [](int, int, int, Accum, Accum) {});
        if (partial) {
            s.row = work.k0 + row0, s.column = tile * BLOCK_Q;
            const AttentionMask attn_mask(p, work.sequence(p), work.window, h);
#pragma unroll
            for (int n = 0; n < QT; n += CHUNK) {
                begin_chunk<CHUNKED>(s);
                s.masked_fill_positions(attn_mask, n, n + CHUNK);
                end_chunk<true>(s, n + CHUNK, infinity<Accum>());
            }
        }
        softmax(0);
        softmax(HALF);
        order_after(s.x[0][QT - 1][3] == infinity<Accum>());
        issue_dv(0);
        warpgroup_wait<1>(atoms<HALF>(dp, 0));
        finish_ds(0);
        order_after(ds[HALF / 2 - 1].r[3] == ~0u);
        warpgroup_wait<0>(dv);
        issue_dp(HALF);
        issue_dv(HALF);
        issue_dk(0);
        smem.ds_empty(ds_pipe.stage).wait(ds_pipe.phase ^ 1);
        store_ds(0);
        warpgroup_wait<2>(atoms<HALF>(dp, HALF));
        finish_ds(HALF);
        store_ds(HALF);
        publish_ds();
        warpgroup_wait<1>(dv);
        // Safe: the GEMMs that read dO are complete. delta has been used: dS, computed from it, is stored
        // and fenced.
        smem.dout_empty(pipe.stage).arrive();
        issue_dk(HALF);
        smem.ds_full(ds_pipe.stage).wait(ds_pipe.phase);
        warpgroup_wait<0>(dk);
        // Safe: the GEMMs that read q are complete. lse was used by P, before dS.
        smem.q_empty(pipe.stage).arrive();
        add_dq(false);
    };

    // One GEMM after the other.
    auto nan_safe_step = [&](bool partial, bool) {
        const bool masked = has_masked(p, work, tile, partial);
        const NonFiniteDout table{smem.ds(ds_pipe.next().stage).address};
        issue_s(masked);
        warpgroup_wait<0>(s);
        smem.dout_full(pipe.stage).wait(pipe.phase);
        const bool non_finite = masked && clean_q_and_dout(smem, pipe.stage, pipe.stage, table);
        s.row = work.k0 + row0, s.column = tile * BLOCK_Q;
        const Attended<1, QT> attended =
            recompute_p_nan_safe(p, work.sequence(p), h, masked, smem.storage.lse_log2[pipe.stage],
                                 inputs, s, probs, non_finite, table, dv);
        gemm_async<Element>(dv, probs, smem.dout(pipe.stage));
        warpgroup_wait<0>(dv);
        smem.ds_empty(ds_pipe.stage).wait(ds_pipe.phase ^ 1);
#pragma unroll
        for (int n = 0; n < QT; n += HALF) {
            issue_dp(n);
            warpgroup_wait<0>(atoms<HALF>(dp, n));
            compute_ds(smem.storage.delta[pipe.stage], Accum(p.dropout_scale), dp, s, n, n + HALF);
            attended.fill_others(dp, 0, n, n + HALF);  // delta is NaN where dO was not finite
            convert(ds, dp, n, n + HALF);
            store_ds(n);
            issue_dk(n);
            warpgroup_wait<0>(dk);
        }
        publish_ds();
        smem.dout_empty(pipe.stage).arrive();  // safe as in `step`
        smem.q_empty(pipe.stage).arrive();
        smem.ds_full(ds_pipe.stage).wait(ds_pipe.phase);
        add_dq(masked);
    };

    for (;;) {
        dk.clear();
        dv.clear();
        smem.k_full().wait(k_pipe.phase);
        k_pipe.advance();
        if (work.is_end) break;
        const bool attended = !work.tiles.is_empty();
        if (attended) {
            zero_unattended(p, smem, work, v_pipe.phase);
            if constexpr (NAN_SAFE) clean_k(smem);
            smem.v_full().wait(v_pipe.phase);
            v_pipe.advance();
            if constexpr (NAN_SAFE)
                for_each_tile<false, false>(p, work, h, tile, nan_safe_step);
            else
                for_each_tile<false, false>(p, work, h, tile, step);
            smem.v_empty().arrive();  // safe: the last step has waited for all GEMMs
        }
        const WorkTile done = smem.storage.work_tile;
        // Safe: all GEMMs that read k are complete. The producer overwrites the work tile with generic
        // stores, which need no proxy fence.
        smem.k_empty().arrive();
        if constexpr (SCALES_DV) dv.scale(dv_scale(p));
        flag_non_finite(p, done, dv);
        store_gradient(p, smem, p.dv, p.dv_at, int(p.Dv), done, row0, dv, ds_pipe);
        dk.scale(Accum(p.scale));
        flag_non_finite(p, done, dk);
        store_gradient(p, smem, p.dk, p.dk_at, int(p.D), done, row0, dk, ds_pipe);
    }
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    backward_halves_sm90(const __grid_constant__ Params p, const __grid_constant__ BackwardMaps maps) {
    run_backward(p, maps, [&](const Smem& smem, int warpgroup) { consume(p, smem, warpgroup); });
}
