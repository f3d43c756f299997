// Backward pass for q of float32 on Hopper: as backward_wide_dq_sm90.cu. Each GEMM is three GEMMs of float16
// numbers (split_gemm_sm90.cuh).
//
// A head fails as in forward_float32_sm90.cu. Generic kernels compute it again.
#include "dq_mainloop_sm90.cuh"
#include "long_sums.cuh"
#include "split_gemm_sm90.cuh"

constexpr int NT = BLOCK_K / 8, DT = HEAD_DIM / 8;
static_assert(TILE_ROWS % BLOCK_K == 0 && !PAIR, "a tile has one factor");
static_assert(!(WRITE_DBIAS && HAS_SCORE_GRAD), "dS is also dbias");
// Products one after the other, to save registers.
constexpr bool IN_TURN = HEAD_DIM > 128 || HAS_TILE_LIST;

// A consumer warpgroup.
__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    const int row0 = threadIdx.x / WARP % 4 * 16;
    const bool leads = threadIdx.x % WARPGROUP == 0;
    PipelineState<1> work_pipe;
    PipelineState<STAGES> pipe;
    WorkTile work{};
    int tile = 0;
    Range attended{};  // keys that some query attends to
    StagedTile staged{};
    SplitSums<VALUE_DIM, NT> dp_sums;
    SplitSums<HEAD_DIM, NT> s_sums;
    Scores<false, 1, NT> s(0, 0);
    Fragment<Accum, 1, NT> dp;
    Fragment<Accum, 1, DT> dq;
    SplitOperand<BLOCK_K / 16> ds;
    Accum lse_log2[2], delta[2];
    HeldBias<false, NT> bias(nullptr);

    // One thread arrives: the GEMM that reads the stage belongs to the whole warpgroup, and is complete. With a
    // tile list all threads do, since each has read the tile of the stage.
    auto release = [&] {
        if (HAS_TILE_LIST || leads) smem.empty(pipe.stage).arrive();
        pipe.advance();
    };
    // Skip tiles that only the other warpgroup attends to.
    auto skip_tiles = [&](int count) {
#pragma unroll 1
        for (int n = 2 * count; n > 0; --n) {
            smem.full(pipe.stage).wait(pipe.phase);
            // The warps may have drifted apart: no GEMM has synchronised them.
            sync_warpgroup(warpgroup);
            release();
        }
    };

    for (;;) {
        smem.q_full(warpgroup).wait(work_pipe.phase);
        work_pipe.advance();
        work = smem.storage.work_tiles[warpgroup];
        if (work.is_end) break;
        dq.clear();
        attended = attended_keys(p, work);
        const int kv = work.h / int(p.group), q_tile = work.q0 / TILE_ROWS;
        const i64 keys = first_factor(p, p.Hkv, p.Nk, work.entry(), kv, work.k_start, work.b);
        const i64 own = first_factor(p, p.Hq, p.Nq, work.entry(), work.h, work.q_start, work.b) + q_tile;
        const bool has_rows = work.q0 < work.Nq(p);
        const float q_inverse = has_rows ? p.q_factors[own] : 0;
        const float dout_inverse = has_rows ? p.dout_factors[own] : 0;
        float farthest = 0;
        LongGradient<BLOCK_K> long_sums;
        auto rows_of_dq = [&] {
            int row = row0;
            hide(row);  // so that addresses are not kept in registers
            row += work.q0;
            return ResultRows{rows_of<Element>(p.dq, p.dq_at, work.entry(), work.h) +
                                  (i64(work.q_start) + row) * p.dq_at.n,
                              p.dq_at.n, work.Nq(p) - row, int(p.D)};
        };
        bool any = work.tiles.begin < work.tiles.end;
        if (any) {
            load_statistics(p, work, row0, lse_log2, delta);
            tile = work.tiles.begin;
            skip_tiles(tile - work.begin);
        } else {
            skip_tiles(work.end - work.begin);
        }
        // The warpgroup gives the work tile back after the loop. If no tile is attended to, the loop reads nothing: the
        // loads of the bounds that only the loop uses must have ended before.
        order_after((work.tiles.full_begin | work.tiles.full_end) == 0x7fffffff);
        // q and dO are held throughout:
        //
        //     step          GEMMs in flight      stages held
        //     dP            dP                   v
        //     S             S                    k
        //     dS            -                    k
        //     dQ            dQ                   k
        while (any) {
            long_sums.begin_tiles(long_sums.GROUP, [&](auto add) { add(dq, rows_of_dq()); });
            int left = long_sums.GROUP;
#pragma unroll 1
            for (; any && left > 0; --left, ++tile) {
                smem.full(pipe.stage).wait(pipe.phase);
                if constexpr (HAS_TILE_LIST) staged = smem.storage.tiles[pipe.stage], tile = staged.tile();
                const i64 factor_at = keys + tile * BLOCK_K / TILE_ROWS;
                const float k_inverse = p.k_factors[factor_at], dp_inverse = p.v_factors[factor_at] * dout_inverse;
                const ValueTile v = smem.v(pipe.stage);
                zero_unattended(v, tile_columns(VALUE_DIM), tile, attended, warpgroup);
                dp_sums.issue(smem.dout(warpgroup), v);
                dp_sums.template wait<0>();
                release();
                dp_sums.join(dp, {dp_inverse, dp_inverse});
                smem.full(pipe.stage).wait(pipe.phase);
                const KeyTile k = smem.k(pipe.stage);
                zero_unattended(k, tile_columns(HEAD_DIM), tile, attended, warpgroup);
                s_sums.issue(smem.q(warpgroup), k);
                bias.load(ScoreMod(p, work.b, work.h), work.q0 + row0, tile * BLOCK_K);
                s_sums.template wait<0>();
                s_sums.join(s, {q_inverse * k_inverse, q_inverse * k_inverse});
                farthest = maximum_or_nan(farthest, k_inverse);
                const bool partial = HAS_TILE_LIST ? staged.is_partial() : work.tiles.is_partial(tile);
                s.row = work.q0 + row0, s.column = tile * BLOCK_K;
                compute_ds(p, work, partial, bias, lse_log2, delta, s, dp, [](int) {});
                if constexpr (WRITE_DBIAS) {
                    // With several copies of dbias each batch entry has its own.
                    BiasElement* const dbias = static_cast<BiasElement*>(p.dbias_copies > 1 ? p.dbias_sums : p.dbias);
                    const i64 first = (i64(work.entry()) * p.Hq + work.h) * p.Nq * p.Nk;
                    WarpBias<false, 1, NT>(nullptr).write(dbias + first, ScoreMod(p, work.b, work.h), work.q0 + row0,
                                                          tile * BLOCK_K, dp);
                }
                float factor[2];
                row_factors(dp, factor);
                ds.split(dp, factor);
                add_split_product<8, IN_TURN>(dq, ds, k, {inverse_power(factor[0]) * k_inverse,
                                                          inverse_power(factor[1]) * k_inverse});
                release();
                any = HAS_TILE_LIST ? !staged.is_last() : tile + 1 < work.tiles.end;
            }
        }
        smem.q_empty(warpgroup).arrive();  // safe: the GEMMs that read q and dO are complete
        if (work.tiles.begin < work.tiles.end) skip_tiles(work.end - work.tiles.end);
        long_sums.end(dq, rows_of_dq());
        clear_past_end(p, work, row0, dq);
        if (!(dq.all_finite() & keeps_digits(p, q_inverse, farthest))) fail_head(p, work.b, kv);
        dq.scale(Accum(p.scale));
        rows_of_dq().store(dq);
    }
}

// One consumer warpgroup has as many registers as a thread can have. Producers need more to search for tiles.
constexpr bool SHARES_REGISTERS = CONSUMERS > 1;
using Share = Registers<HAS_TILE_LIST ? 40 : 24>;

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    backward_float32_dq_sm90(const __grid_constant__ Params p, const __grid_constant__ BackwardMaps maps) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage;
    const Smem smem{shared_address(tensors), storage};
    const int warpgroup = warpgroup_index();
    set_up(smem, maps.k, maps.q, maps.v, maps.dout);
    wait_for_prerequisites();
    __syncthreads();
    if (warpgroup == CONSUMERS) {
        if constexpr (SHARES_REGISTERS) reg_dealloc<Share::PRODUCER>();
        const int warp = uniform(threadIdx.x / WARP);
        if (warp == WARPS_M && (!PRODUCES_ALONE || is_first_lane())) produce(p, maps, smem);
    } else {
        if constexpr (SHARES_REGISTERS) reg_alloc<Share::CONSUMER>();
        consume(p, smem, warpgroup);
    }
}
