// Backward pass on Hopper, for q, k and v. A producer warp loads tiles of q and dO into circular
// buffers; two consumer warpgroups compute 64 keys each; two dQ store warps add dQ in float32 to
// device memory. CTAs are persistent: each takes one block of keys after another, with all query heads that
// share it. S is computed transposed, so that P and dS in registers are operands of dV and dK, which also
// stay in registers. Mirrors backward_dkdv.cu. Shah et al., FlashAttention-3, arXiv:2407.08608.
#include "bwd_mainloop_sm90.cuh"

constexpr int DQT = DQ_COLUMNS / 8;
// True if dV is stored during the last GEMM of dK. A split may have to wait for the other one, with both.
constexpr bool DV_FIRST = DS_STAGES > 1 && !NAN_SAFE && !SPLIT_Q;
static_assert(!HAS_SCORE_GRAD || BLOCK_Q <= 64, "derivatives need registers, too");
static_assert(WARPGROUP / WARP * STAGING_BYTES <= ScoreTile::SLICE,
              "only this warpgroup writes there");

// The work tile of a consumer: a copy. A split has more fields, and reads them in shared memory each time, to
// save registers; it makes a copy for the epilogue.
struct ConsumerWork {
    const Smem& smem;
    WorkTile own{};

    __device__ const WorkTile& current() const { return SPLIT_Q ? smem.storage.work_tile : own; }
    __device__ void begin() {
        if constexpr (!SPLIT_Q) own = smem.storage.work_tile;
    }
    // Hand back k and the work tile.
    __device__ void release() {
        if constexpr (SPLIT_Q) own = smem.storage.work_tile;
        smem.k_empty().arrive();
    }
};

// A consumer warpgroup. The other one may be up to a tile ahead or late, so that the GEMMs of one overlap
// with the exponentials of the other.
__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    const int row0 = threadIdx.x / WARP * 16;
    PipelineState<1> k_pipe, v_pipe;
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<DOUT_STAGES> dout_pipe;
    PipelineState<DS_STAGES> ds_pipe;
    PipelineState<DQ_STAGES> dq_pipe;

    ConsumerWork held{smem};
    const WorkTile &work = held.current(), &own = held.own;
    int tile = 0, h = 0;
    TileScores s(0, 0);
    Fragment<Accum, 1, QT> dp;
    Fragment<Accum, 1, DT> dk;
    Fragment<Accum, 1, VT> dv;
    Operands probs, ds;
    Atom<Element>::A v[VALUE_DIM / 16];  // if dQ is staged beside dP
    TileInputs inputs(smem);
    int dk_stage = 0;  // of q, which the GEMM of dK reads

    auto issue_s = [&](bool partial) {
        const QueryTile q = smem.q(q_pipe.stage);
        smem.q_full(q_pipe.stage).wait(q_pipe.phase);
        if (partial) zero_past_end<HEAD_DIM>(p, q, work, tile * BLOCK_Q, warpgroup);
        gemm_async<Element, HEAD_DIM>(s, smem.k(), WARPGROUP_ROWS * warpgroup, q);
    };
    auto softmax = [&](bool partial, const TileLse& lse_log2) {
        s.row = work.k0 + row0, s.column = tile * BLOCK_Q;
        recompute_p(p, work.sequence(p), h, partial, lse_log2, inputs, s, probs);
    };
    auto issue_dv = [&](bool partial) {
        const DoutTile dout = smem.dout(dout_pipe.stage);
        smem.dout_full(dout_pipe.stage).wait(dout_pipe.phase);
        if (partial) zero_past_end<VALUE_DIM>(p, dout, work, tile * BLOCK_Q, warpgroup);
        gemm_async<Element>(dv, probs, dout);
    };
    auto issue_dp = [&] {
        const DoutTile dout = smem.dout(dout_pipe.stage);
        if constexpr (DQ_BESIDE_DP)
            gemm_async_k<Element>(dp, v, dout);
        else
            gemm_async<Element, VALUE_DIM>(dp, smem.v(), WARPGROUP_ROWS * warpgroup, dout);
    };
    // Finish dP of the current tile, and publish dS. finish_ds() changes dS before that.
    auto publish_ds = [&](auto finish_ds) {
        warpgroup_wait<0>(dp);
        if constexpr (DQ_BESIDE_DP) warpgroup_wait<0>(dv);
        const float* const delta = smem.storage.delta[dout_pipe.stage];
        if constexpr (P_IS_ROUNDED)
            compute_ds(delta, Accum(p.dropout_scale), dp, probs);
        else
            compute_ds(delta, Accum(p.dropout_scale), dp, s);
        finish_ds();
        convert(ds, dp);
        smem.ds_empty(ds_pipe.stage).wait(ds_pipe.phase ^ 1);
        store_transposed<Element>(smem.ds(ds_pipe.stage), ds, row0);
        fence_async_shared();
        smem.ds_full(ds_pipe.stage).arrive();
        // Safe: dP is complete, so dV, issued before it, is too. delta has been used: dS, computed from
        // it, is stored and fenced.
        smem.dout_empty(dout_pipe.stage).arrive();
        dout_pipe.advance();
        dk_stage = q_pipe.stage;
        q_pipe.advance();
    };
    auto issue_dk = [&] { gemm_async<Element>(dk, ds, smem.q(dk_stage)); };
    auto issue_dq = [&](Fragment<Accum, 1, DQT>& dq, bool masked) {
        const DqShare share = dq_share(warpgroup);
        smem.ds_full(ds_pipe.stage).wait(ds_pipe.phase);  // dS of all keys
        const KeyTile k = k_of_dq(smem, masked);
        if constexpr (DQ_IS_TRANSPOSED)
            gemm_async_transposed<Element>(dq, k, share.column, smem.ds(ds_pipe.stage));
        else
            gemm_async_mn<Element>(dq, smem.ds(ds_pipe.stage), share.row, k, share.column);
    };
    auto finish_dq = [&](const Fragment<Accum, 1, DQT>& dq) {
        // Safe: only dQ's GEMM reads the stage, and it is complete.
        smem.ds_empty(ds_pipe.stage).arrive();
        ds_pipe.advance();
        publish_dq(smem, warpgroup, dq, row0 % WARPGROUP_ROWS, dq_pipe);
    };
    auto store_dv = [&](const PipelineState<DS_STAGES>& staging) {
        if constexpr (SCALES_DV) dv.scale(dv_scale(p));
        flag_non_finite(p, own, dv);
        store_gradient(p, smem, p.dv, p.dv_at, int(p.Dv), own, row0, dv, staging);
    };
    auto load_inputs = [&] { inputs.load(p, work.b, h, work.k0 + row0, tile * BLOCK_Q); };
    auto prologue = [&](bool partial) {
        load_inputs();
        issue_s(partial);
        smem.v_full().wait(v_pipe.phase);
        v_pipe.advance();
        if constexpr (DQ_BESIDE_DP) {
            const int lane = threadIdx.x % WARP;
#pragma unroll
            for (int k = 0; k < VALUE_DIM / 16; ++k)
                load_matrices(v[k].r, smem.v().chunk(row0 + lane % 16, 32 * k + lane / 16 * 16));
        }
        const TileLse lse_log2 = smem.storage.lse_log2[q_pipe.stage];
        warpgroup_wait<0>(s);
        softmax(partial, lse_log2);
        issue_dv(partial);
        warpgroup_wait<0>(dv);  // dP needs the registers of the operands of dV
        issue_dp();
    };
    // From dP of tile j to dP of tile j + 1; k and v are held throughout:
    //
    //     step                       GEMMs in flight      stages held
    //     wait dP, publish dS of j   -                    q(j), dO(j); then q(j), dS(j)
    //     issue S of j + 1, dK of j  S, dK                q(j), q(j + 1), dS(j)
    //     wait S, softmax of j + 1   dK                   q(j), q(j + 1), dS(j)
    //     issue dV, wait dK          dV                   q(j + 1), dS(j), dO(j + 1)
    //     issue dQ of j              dV, dQ               q(j + 1), dS(j), dO(j + 1)
    //     wait all, publish dQ       -                    q(j + 1), dO(j + 1)
    //     issue dP of j + 1          dP                   q(j + 1), dO(j + 1)
    //
    // Where dQ is staged beside dP:
    //
    //     wait dP, publish dS of j   -                    q(j), dO(j); then q(j), dS(j)
    //     issue S of j + 1, dK of j  S, dK                q(j), q(j + 1), dS(j)
    //     wait all, softmax of j + 1 -                    q(j + 1), dS(j)
    //     issue dQ, dV, dP           dQ, dV, dP           q(j + 1), dS(j), dO(j + 1)
    //     wait dQ, publish dQ        dV, dP               q(j + 1), dO(j + 1)
    auto step = [&](bool partial, bool) {
        Fragment<Accum, 1, DQT> dq;
        publish_ds([] {});
        load_inputs();
        issue_s(partial);
        issue_dk();
        const TileLse lse_log2 = smem.storage.lse_log2[q_pipe.stage];
        if constexpr (DQ_BESIDE_DP) {
            warpgroup_wait<0>(s);
            warpgroup_wait<0>(dk);
            smem.q_empty(dk_stage).arrive();  // safe as below
            softmax(partial, lse_log2);
            order_after(probs);
            issue_dq(dq, false);
            issue_dv(partial);
            issue_dp();
            warpgroup_wait<2>(dq);
            finish_dq(dq);
        } else {
            warpgroup_wait<1>(s);
            softmax(partial, lse_log2);
            issue_dv(partial);
            warpgroup_wait<1>(dk);
            // Safe: the GEMMs that read this q are complete. Its lse was used by P, and so before dS,
            // which `publish_ds` has stored and fenced.
            smem.q_empty(dk_stage).arrive();
            issue_dq(dq, false);
            warpgroup_wait<0>(dv);
            warpgroup_wait<0>(dq);
            finish_dq(dq);
            issue_dp();
        }
    };
    auto last_step = [&] {
        Fragment<Accum, 1, DQT> dq;
        publish_ds([] {});
        // Safe: only GEMMs read v, and the last dP is complete; or v was loaded to registers before the
        // fence of `publish_ds`.
        smem.v_empty().arrive();
        issue_dk();
        if constexpr (DV_FIRST) store_dv(ds_pipe.next());  // overlaps with dK
        issue_dq(dq, false);
        warpgroup_wait<0>(dk);
        warpgroup_wait<0>(dq);
        smem.q_empty(dk_stage).arrive();  // safe as in `step`
        // Safe: all GEMMs that read k are complete, and every thread has copied the work tile. The
        // producer overwrites it with generic stores, which need no proxy fence.
        held.release();
        finish_dq(dq);
        if constexpr (!DV_FIRST && !SPLIT_Q) store_dv(ds_pipe);
    };

    // One GEMM after the other.
    auto nan_safe_step = [&](bool partial, bool) {
        const bool masked = has_masked(p, work, tile, partial);
        const NonFiniteDout table{smem.ds(ds_pipe.next().stage).address};
        load_inputs();
        issue_s(masked);
        warpgroup_wait<0>(s);
        smem.dout_full(dout_pipe.stage).wait(dout_pipe.phase);
        const bool non_finite =
            masked && clean_q_and_dout(smem, q_pipe.stage, dout_pipe.stage, table);
        s.row = work.k0 + row0, s.column = tile * BLOCK_Q;
        const Attended<1, QT> attended =
            recompute_p_nan_safe(p, work.sequence(p), h, masked, smem.storage.lse_log2[q_pipe.stage],
                                 inputs, s, probs, non_finite, table, dv);
        issue_dv(masked);
        warpgroup_wait<0>(dv);
        issue_dp();  // delta is NaN where dO was not finite
        Fragment<Accum, 1, DQT> dq;
        publish_ds([&] { attended.fill_others(dp, 0); });
        issue_dk();
        issue_dq(dq, masked);
        warpgroup_wait<0>(dk);
        warpgroup_wait<0>(dq);
        smem.q_empty(dk_stage).arrive();  // safe as in `step`
        finish_dq(dq);
    };

    for (;;) {
        dk.clear();
        dv.clear();
        smem.k_full().wait(k_pipe.phase);
        k_pipe.advance();
        held.begin();
        if (work.is_end) break;
        const bool attended = !work.tiles.is_empty();
        if (attended) zero_unattended(p, smem, work, v_pipe.phase);
        if (attended && NAN_SAFE) {
            clean_k(smem);
            smem.v_full().wait(v_pipe.phase);
            v_pipe.advance();
            for_each_tile<false, false>(p, work, h, tile, nan_safe_step);
            // Safe: the last step has waited for all GEMMs.
            smem.v_empty().arrive();
            held.release();
            if constexpr (!SPLIT_Q) store_dv(ds_pipe);
        } else if (attended) {
            const QueryTileList list(p, work);
            h = work.first_head(p), tile = list.tile(work.tiles.first);
            prologue(is_partial(work, list, work.tiles.first));
            for_each_tile<true, false>(p, work, h, tile, step);
            last_step();
        } else {
            held.release();  // safe: the branch depended on the work tile
            if constexpr (!SPLIT_Q) store_dv(ds_pipe);
        }
        if (join_splits(p, own, dk, dv)) {
            if constexpr (SPLIT_Q) store_dv(ds_pipe);
            dk.scale(Accum(p.scale));
            flag_non_finite(p, own, dk);
            store_gradient(p, smem, p.dk, p.dk_at, int(p.D), own, row0, dk, ds_pipe);
        }
        // All warps have read their staging memory.
        sync_warpgroup(warpgroup);
    }
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    backward_sm90(const __grid_constant__ Params p, const __grid_constant__ BackwardMaps maps) {
    run_backward(p, maps, [&](const Smem& smem, int warpgroup) { consume(p, smem, warpgroup); });
}
