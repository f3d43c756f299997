// Backward pass for k and v of float32 on Hopper: as backward_wide_sm90.cu, where one warpgroup accumulates dV and
// the other dK, both for the same 64 keys. Each GEMM is three GEMMs of float16 numbers (split_gemm_sm90.cuh).
// backward_float32_dq_sm90.cu computes dQ. So nothing is added in device memory, and the order of the sums is
// fixed.
//
// A head fails as in forward_float32_sm90.cu. Generic kernels compute it again.
#include "bwd_mainloop_sm90.cuh"
#include "long_sums.cuh"

static_assert(!SPLIT_Q && IS_WIDE && !PAIR && CONSUMERS == 2 && BLOCK_K == TILE_ROWS && TILE_ROWS % BLOCK_Q == 0);

constexpr int DV_WARPGROUP = 0, DK_WARPGROUP = 1;
// Load the mask and the bias of a tile after the GEMM of S, not beside it: wide sums leave no registers.
constexpr bool LOADS_LATE = VALUE_DIM > 64;
// Products one after the other, to save registers.
constexpr bool IN_TURN = HEAD_DIM > 128 || VALUE_DIM > 128 || LOADS_LATE && (HAS_ALIBI || HAS_BIAS || HAS_MASK);

// The inverse factors of the tiles of keys and values, and of each query head.
struct Factors {
    const Params& p;
    const WorkTile& work;

    __device__ float of_keys(const float* all) const {
        return all[first_factor(p, p.Hkv, p.Nk, work.entry(), work.kv, work.k_start, work.b) + work.k0 / BLOCK_K];
    }
    __device__ float of_queries(const float* all, int h, int tile) const {
        return all[first_factor(p, p.Hq, p.Nq, work.entry(), h, work.q_start, work.b) +
                   tile * BLOCK_Q / TILE_ROWS];
    }
};

// Where dk or dv of 16 rows of each warp goes.
__device__ inline ResultRows results_of(const Params& p, void* target, const Rows& at, i64 columns,
                                        const WorkTile& work) {
    int row = threadIdx.x / WARP % 4 * 16;
    hide(row);  // so that addresses are not kept in registers
    row += work.k0;
    return {rows_of<Element>(target, at, work.entry(), work.kv) + (work.k_start + row) * at.n, at.n,
            work.Nk(p) - row, int(columns)};
}

// Scale and store the sums, and flag the head if a number is not finite.
template <int NT>
__device__ inline void store_sums(const Params& p, const ResultRows& results, const WorkTile& work,
                                  Fragment<Accum, 1, NT>& acc, const LongGradient<BLOCK_Q>& sums, float scale, bool good) {
    sums.end(acc, results);
    acc.scale(scale);
    if (!(acc.all_finite() & good)) fail_head(p, work.b, work.kv);
    results.store(acc);
}

// The step of dV has a second copy for tiles without masked-out pairs. Two copies of wider steps would exceed the
// instruction cache. Two copies are 1.5 to 3 % faster at D = 64 and 128, and 1.5 % slower at 256 (H200, 2,048 keys:
// docs/tuning-log.md).
constexpr bool TWO_COPIES = HEAD_DIM <= 128 && VALUE_DIM <= 128;

// Call step(partial) for each query tile and head of a work tile. The sums go to their totals before the heads of a
// tile, outside the inner loop.
template <class AddToTotal, class Step>
__device__ __forceinline__ void for_each_tile_of_groups(const Params& p, const WorkTile& work, int& h, int& tile,
                                              LongGradient<BLOCK_Q>& sums, AddToTotal add_to_total, Step step) {
    const QueryTileList list(p, work);
    for_each_index(p, work, [&](int index, int begin, int end) {
        sums.begin_tiles(end - begin, add_to_total);
        tile = list.tile(index);
        const bool partial = is_partial(work, list, index);
#pragma unroll 1
        for (h = begin; h < end; ++h) step(partial);
    });
}

// The warpgroup of dV.
__device__ __forceinline__ void consume_for_dv(const Params& p, const Smem& smem) {
    const int row0 = threadIdx.x / WARP % 4 * 16;
    PipelineState<1> k_pipe, v_pipe;
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<DOUT_STAGES> dout_pipe;
    PipelineState<P_STAGES> p_pipe;
    WorkTile work{};
    int tile = 0, h = 0;
    SplitSums<HEAD_DIM, QT> sums;
    TileScores s(0, 0);
    Fragment<Accum, 1, VT> dv;
    LongGradient<BLOCK_Q> long_sums;
    Operands probs;
    TileInputs inputs(smem);
    float k_inverse = 0, farthest = 0;

    //     step                       GEMMs in flight      stages held
    //     S                          S                    q
    //     softmax, publish P         -                    q
    //     dV                         dV                   dO
    auto rows_of_dv = [&] { return results_of(p, p.dv, p.dv_at, p.Dv, work); };
    auto add_to_total = [&](auto add) { add(dv, rows_of_dv()); };
    auto step = [&](bool partial) {
        const Factors factors{p, work};
        const float q_inverse = factors.of_queries(p.q_factors, h, tile);
        const float dout_inverse = factors.of_queries(p.dout_factors, h, tile) / SPLIT_P;
        const QueryTile q = smem.q(q_pipe.stage);
        smem.q_full(q_pipe.stage).wait(q_pipe.phase);
        zero_past_end<HEAD_COLUMNS>(p, q, work, tile * BLOCK_Q, DV_WARPGROUP);
        sums.issue(smem.k(), q);
        if constexpr (!LOADS_LATE) inputs.load(p, work.b, h, work.k0 + row0, tile * BLOCK_Q);
        sums.template wait<0>();
        farthest = maximum_or_nan(farthest, q_inverse);
        sums.join(s, {q_inverse * k_inverse, q_inverse * k_inverse});
        if constexpr (LOADS_LATE) inputs.load(p, work.b, h, work.k0 + row0, tile * BLOCK_Q);
        s.row = work.k0 + row0, s.column = tile * BLOCK_Q;
        recompute_p(p, work.sequence(p), h, partial, smem.storage.lse_log2[q_pipe.stage], inputs, s, probs);
        fence_async_shared();  // for lse, which TMA overwrites
        smem.p_empty(p_pipe.stage).wait(p_pipe.phase ^ 1);
        store_exchange(smem.p(p_pipe.stage), s);
        smem.p_full(p_pipe.stage).arrive();
        p_pipe.advance();
        // Safe: the GEMM of S is complete. lse has been used: P, computed from it, is stored.
        smem.q_empty(q_pipe.stage).arrive();
        q_pipe.advance();
        const DoutTile dout = smem.dout(dout_pipe.stage);
        smem.dout_full(dout_pipe.stage).wait(dout_pipe.phase);
        zero_past_end<VALUE_COLUMNS>(p, dout, work, tile * BLOCK_Q, DV_WARPGROUP);
        add_split_product<8, IN_TURN>(dv, probs, dout, {dout_inverse, dout_inverse});
        smem.dout_empty(dout_pipe.stage).arrive();  // safe: only dV's GEMM read it here
        dout_pipe.advance();
    };

    for (;;) {
        smem.k_full().wait(k_pipe.phase);
        k_pipe.advance();
        work = smem.storage.work_tile;
        if (work.is_end) break;
        dv.clear();
        long_sums = {}, farthest = 0, k_inverse = Factors{p, work}.of_keys(p.k_factors);
        if (!work.tiles.is_empty()) {
            zero_unattended(p, smem, work, v_pipe.phase);
            v_pipe.advance();
            for_each_tile_of_groups(p, work, h, tile, long_sums, add_to_total, [&](bool partial) {
                if constexpr (TWO_COPIES)
                    partial ? step(true) : step(false);
                else
                    step(partial);
            });
        }
        // Safe: all GEMMs that read k are complete, and the steps have read the work tile.
        smem.k_empty().arrive();
        store_sums(p, rows_of_dv(), work, dv, long_sums, dv_scale(p), keeps_digits(p, k_inverse, farthest));
    }
}

// The warpgroup of dK.
__device__ __forceinline__ void consume_for_dk(const Params& p, const Smem& smem) {
    PipelineState<1> k_pipe, v_pipe;
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<DOUT_STAGES> dout_pipe;
    PipelineState<P_STAGES> p_pipe;
    WorkTile work{};
    int tile = 0, h = 0;
    SplitSums<VALUE_DIM, QT> sums;
    Fragment<Accum, 1, QT> dp;
    Fragment<Accum, 1, DT> dk;
    LongGradient<BLOCK_Q> long_sums;
    Operands ds;
    float v_inverse = 0;

    //     step                       GEMMs in flight      stages held
    //     dP                         dP                   dO
    //     wait for P, dS             -                    dO, P
    //     dK                         dK                   q
    auto rows_of_dk = [&] { return results_of(p, p.dk, p.dk_at, p.D, work); };
    auto add_to_total = [&](auto add) { add(dk, rows_of_dk()); };
    auto step = [&](bool) {
        const Factors factors{p, work};
        const float q_inverse = factors.of_queries(p.q_factors, h, tile);
        const float inverse = factors.of_queries(p.dout_factors, h, tile) * v_inverse;
        const DoutTile dout = smem.dout(dout_pipe.stage);
        smem.dout_full(dout_pipe.stage).wait(dout_pipe.phase);
        zero_past_end<VALUE_COLUMNS>(p, dout, work, tile * BLOCK_Q, DK_WARPGROUP);
        sums.issue(smem.v(), dout);
        sums.template wait<0>();
        sums.join(dp, {inverse, inverse});
        {
            Fragment<Accum, 1, QT> s;
            smem.p_full(p_pipe.stage).wait(p_pipe.phase);
            load_exchange(s, smem.p(p_pipe.stage));
            compute_ds(smem.storage.delta[dout_pipe.stage], Accum(p.dropout_scale), dp, s);
        }
        float factor[2];
        row_factors(dp, factor);
        ds.split(dp, factor);
        // Safe: P and delta have been used by dS. Generic stores overwrite P, which need no fence; delta is
        // fenced below. The GEMM of dP is complete.
        smem.p_empty(p_pipe.stage).arrive();
        p_pipe.advance();
        fence_async_shared();
        smem.dout_empty(dout_pipe.stage).arrive();
        dout_pipe.advance();
        const QueryTile q = smem.q(q_pipe.stage);
        smem.q_full(q_pipe.stage).wait(q_pipe.phase);
        zero_past_end<HEAD_COLUMNS>(p, q, work, tile * BLOCK_Q, DK_WARPGROUP);
        add_split_product<8, IN_TURN>(dk, ds, q, {inverse_power(factor[0]) * q_inverse, inverse_power(factor[1]) * q_inverse});
        smem.q_empty(q_pipe.stage).arrive();  // safe: only dK's GEMM read it here
        q_pipe.advance();
    };

    for (;;) {
        smem.k_full().wait(k_pipe.phase);
        k_pipe.advance();
        work = smem.storage.work_tile;
        if (work.is_end) break;
        dk.clear();
        long_sums = {};
        v_inverse = Factors{p, work}.of_keys(p.v_factors);
        if (!work.tiles.is_empty()) {
            zero_unattended(p, smem, work, v_pipe.phase);
            smem.v_full().wait(v_pipe.phase);
            v_pipe.advance();
            for_each_tile_of_groups(p, work, h, tile, long_sums, add_to_total, step);
            smem.v_empty().arrive();  // safe: only GEMMs read v, and the last is complete
        }
        smem.k_empty().arrive();  // safe: the steps have read the work tile
        store_sums(p, rows_of_dk(), work, dk, long_sums, Accum(p.scale), true);
    }
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    backward_float32_sm90(const __grid_constant__ Params p, const __grid_constant__ BackwardMaps maps) {
    run_backward(p, maps, [&](const Smem& smem, int warpgroup) __attribute__((always_inline)) {
        if (warpgroup == DV_WARPGROUP)
            consume_for_dv(p, smem);
        else
            consume_for_dk(p, smem);
    });
}
