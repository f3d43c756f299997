// Backward pass for q on Hopper, for head dimensions above 128: a producer thread loads values and keys
// alternately into one circular buffer, and two consumer warpgroups accumulate dQ of 64 queries each in
// registers. So nothing is added in device memory, and the order of the sums is fixed.
//
// Above 256 columns a cluster of two CTAs shares a work tile (pair_sm90.cuh). A warpgroup exchanges parts of
// dP during the GEMM of S, then parts of S, then dS.
#include "dq_mainloop_sm90.cuh"

constexpr int TURN_BARRIER = CONSUMER_BARRIER + 1;  // one for each warpgroup
constexpr int OWN_KEYS = BLOCK_K / SHARES;  // of a tile, whose scores this CTA finishes
constexpr int NT = OWN_KEYS / 8, DT = HEAD_COLUMNS / 8;
static_assert(NT % 2 == 0, "a step of the GEMM of dQ has 16 keys");
static_assert(!HAS_BIAS, "there is no room for the bias");

// A consumer warpgroup.
__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    const int row0 = threadIdx.x / WARP % 4 * 16;
    const bool leads = threadIdx.x % WARPGROUP == 0;
    PipelineState<1> work_pipe;
    PipelineState<STAGES> pipe;
    int v_stage = 0, k_stage = 0;
    WorkTile work{};
    int tile = 0;
    Range attended{};  // keys that some query attends to
    StagedTile staged{};
    Scores<false, 1, NT> s(0, 0);
    Fragment<Accum, 1, NT> dp;
    Fragment<Accum, 1, SHARES * NT> s_parts, dp_parts;
    Fragment<Accum, 1, DT> dq;
    Atom<Element>::A ds[BLOCK_K / 16];
    Accum lse_log2[2], delta[2];
    Exchange exchange(smem.exchange(warpgroup), smem.storage.exchanges[warpgroup]);
    const WarpBias<false, 1, NT> bias(nullptr);

    // One thread arrives: the GEMM that reads the stage belongs to the whole warpgroup, and is complete.
    // Each thread has read the entry of the stage before that GEMM.
    auto release = [&](int stage) {
        if (leads) smem.empty(stage).arrive();
    };
    auto zero_unattended = [&](const auto& rows, int columns) {
        ::zero_unattended(rows, columns, tile, attended, warpgroup);
    };
    auto issue_dp_and_s = [&] {
        v_stage = pipe.stage;
        smem.full(v_stage).wait(pipe.phase);
        pipe.advance();
        if constexpr (HAS_TILE_LIST) staged = smem.storage.tiles[v_stage], tile = staged.tile();
        zero_unattended(smem.v(v_stage), VALUE_COLUMNS);
        gemm_async<Element, VALUE_COLUMNS>(accumulators(dp, dp_parts), smem.dout(warpgroup), 0,
                                           smem.v(v_stage));
        k_stage = pipe.stage;
        smem.full(k_stage).wait(pipe.phase);
        pipe.advance();
        zero_unattended(smem.k(k_stage), HEAD_COLUMNS);
        gemm_async<Element, HEAD_COLUMNS>(accumulators(s, s_parts), smem.q(warpgroup), 0,
                                          smem.k(k_stage));
    };
    // Wait for dP, then for S, and in paired CTAs add the parts of the other CTA.
    auto wait_dp_and_s = [&] {
        auto add_parts = [&](auto& parts, auto& sums) {
            if constexpr (PAIR) exchange.send(parts, sums), exchange.add(sums), exchange.release();
        };
        warpgroup_wait<1>(accumulators(dp, dp_parts));
        release(v_stage);
        add_parts(dp_parts, dp);
        warpgroup_wait<0>(accumulators(s, s_parts));
        add_parts(s_parts, s);
    };
    // From S and dP to dS, as an operand of dQ.
    auto compute_ds = [&] {
        const bool partial = HAS_TILE_LIST ? staged.is_partial() : work.tiles.is_partial(tile);
        s.row = work.q0 + row0, s.column = tile * BLOCK_K + OWN_KEYS * own_half();
        ::compute_ds(p, work, partial, bias, lse_log2, delta, s, dp,
                     [&](int n) { ds[n / 2] = Atom<Element>::a_of(dp.x[0] + n - 1); });
        if constexpr (PAIR) {
            exchange.send(own_operands<NT / 2>(ds));
            exchange.receive(ds);
            exchange.release();
        }
        order_after(ds);
    };
    // Ping-pong: the warpgroups issue their GEMMs alternately, one tile each, so that one computes dS
    // during the GEMMs of the other.
    auto wait_turn = [&] { named_barrier_sync<CONSUMERS * WARPGROUP>(TURN_BARRIER + warpgroup); };
    auto pass_turn = [&] {
        named_barrier_arrive<CONSUMERS * WARPGROUP>(TURN_BARRIER + 1 - warpgroup);
    };
    // Skip tiles that only the other warpgroup attends to.
    auto skip_tiles = [&](int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            wait_turn();
#pragma unroll 1
            for (int n = 0; n < 2; ++n, pipe.advance()) {
                smem.full(pipe.stage).wait(pipe.phase);
                // The warps may have drifted apart: no GEMM has synchronised them.
                sync_warpgroup(warpgroup);
                release(pipe.stage);
            }
            pass_turn();
        }
    };

    if (warpgroup == 1) pass_turn();

    for (;;) {
        smem.q_full(warpgroup).wait(work_pipe.phase);
        work_pipe.advance();
        work = smem.storage.work_tiles[warpgroup];
        if (work.is_end) break;
        dq.clear();
        attended = attended_keys(p, work);
        if (work.tiles.begin >= work.tiles.end) {
            // Safe: the work tile is in registers, and no GEMM reads q.
            smem.q_empty(warpgroup).arrive();
            skip_tiles(work.end - work.begin);
            wait_turn(), pass_turn();
        } else {
            load_statistics(p, work, row0, lse_log2, delta);
            tile = work.tiles.begin;
            skip_tiles(tile - work.begin);
            wait_turn();
            issue_dp_and_s();
            pass_turn();
            wait_dp_and_s();
            // From dP and S of tile j to those of tile j + 1; q and dO are held throughout:
            //
            //     step                         GEMMs in flight      stages held
            //     dS of j                      -                    k(j)
            //     issue dQ of j                dQ                   k(j)
            //     issue dP, S of j + 1         dQ, dP, S            k(j), v(j + 1), k(j + 1)
            //     wait dQ, dP, S in turn       -                    k(j + 1)
#pragma unroll 1
            while (HAS_TILE_LIST ? !staged.is_last() : tile + 1 < work.tiles.end) {
                const int held = k_stage;
                compute_ds();
                wait_turn();
                gemm_async<Element>(dq, ds, smem.k(held));
                ++tile;
                issue_dp_and_s();
                pass_turn();
                warpgroup_wait<2>(dq);
                release(held);
                wait_dp_and_s();
            }
            smem.q_empty(warpgroup).arrive();  // safe: the GEMMs that read q and dO are complete
            compute_ds();
            wait_turn();
            gemm_async<Element>(dq, ds, smem.k(k_stage));
            pass_turn();
            warpgroup_wait<0>(dq);
            release(k_stage);
            skip_tiles(work.end - work.tiles.end);
        }
        clear_past_end(p, work, row0, dq);
        if (!dq.all_finite()) fail_head(p, work.b, work.h / int(p.group));
        dq.scale(Accum(p.scale));
        const int row = work.q0 + row0, column = own_half() * HEAD_COLUMNS;
        store_rows(rows_of<Element>(p.dq, p.dq_at, work.entry(), work.h) +
                       (work.q_start + row) * p.dq_at.n + column,
                   p.dq_at.n, dq, work.Nq(p) - row, int(p.D) - column);
    }
}

extern "C" __global__ void CLUSTER __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    backward_wide_dq_sm90(const __grid_constant__ Params p, const __grid_constant__ BackwardMaps maps) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage;
    const Smem smem{shared_address(tensors), storage};
    const int warpgroup = warpgroup_index();
    set_up(smem, maps.k, maps.q, maps.v, maps.dout);
    // This kernel reads no result of the kernel of dK and dV. For packed sequences another kernel runs
    // between the two.
    if constexpr (PACKED)
        wait_for_prerequisites();
    else
        pass_kernel_before();
    __syncthreads();
    sync_pair();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<PRODUCER_REGISTERS>();
        const int warp = uniform(threadIdx.x / WARP);
        if (warp == WARPS_M && (!PRODUCES_ALONE || is_first_lane()))
            produce(p, maps, smem), wait_for_prerequisites();
    } else {
        reg_alloc<CONSUMER_REGISTERS>();
        consume(p, smem, warpgroup);
        sync_pair();
    }
}
