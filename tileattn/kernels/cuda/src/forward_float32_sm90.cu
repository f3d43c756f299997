// Forward pass for float32 on Hopper: each GEMM is three GEMMs of float16 numbers (split_gemm_sm90.cuh).
// Producer, work tiles and softmax are as in forward_sm90. Mirrors forward_block in spec.py.
//
// A head fails if a tile of its keys or values cannot be split, if a result is not finite, or if scores are so
// large that lost digits count. The kernel `forward` computes it again. Only the head's own arrays decide this.
#include "fwd_mainloop_sm90.cuh"
#include "head_flags.cuh"
#include "long_sums.cuh"
#include "planes.cuh"
#include "split_gemm_sm90.cuh"

static_assert(TILE_ROWS % BLOCK_K == 0 && ROWS == WARPGROUP_ROWS, "a tile has one factor");

constexpr bool SHIFT_FROM_SUMS = FOLD;
// Columns of atoms of PV at a time. Wide heads, and options beside 128 columns, leave fewer registers.
constexpr bool HAS_REGISTERS = VT <= 8 || (VT <= 16 && !(PACKED || HAS_MASK || HAS_BLOCK_MASK || HAS_DROPOUT));
constexpr int PV_ATOMS = HAS_REGISTERS ? 8 : 4;

// Load and split the queries of a warp, with one factor for each row. Returns the inverse factors of a lane's two
// rows. In registers, as operands of QK, ptxas 13.0 would overwrite the queries in the loop over tiles.
__device__ inline void load_queries(const Params& p, const WorkTile& work, const QueryTile& tile,
                                    float (&inverse)[2]) {
    const Lane lane;
    int warp_lane = threadIdx.x % WARP, row0 = threadIdx.x % WARPGROUP / WARP * 16;
    hide(warp_lane), hide(row0);  // so that addresses that depend on them are not kept in registers
    const int rows = work.Nq(p) - work.q0 - row0;
    const Element* const q = rows_of<Element>(p.q, p.q_at, work.entry(), work.h) +
                             (i64(work.q_start) + work.q0 + row0) * p.q_at.n;
    auto load = [&](int k, int i) {
        const int row = lane.row(2 * (i % 2)), columns = row < rows ? int(p.D) : 0;
        return load_pair(q + row * p.q_at.n, 16 * k + i / 2 * 8 + 2 * lane.t, columns);
    };
    split_own_rows<(HEAD_DIM + 15) / 16>(
        load, inverse, [&](int k, const Atom<float16>::A& high, const Atom<float16>::A& low) {
            const int row = row0 + warp_lane % 16, column = 16 * k + warp_lane / 16 * 8;
            store_matrices(tile.chunk(row, 2 * high_column(column)), high.r);
            store_matrices(tile.chunk(row, 2 * low_column(column)), low.r);
        });
}

// Where the results of a warp go.
__device__ inline RowResults results_of(const Params& p, const WorkTile& work) {
    int row = threadIdx.x % WARPGROUP / WARP * 16;
    hide(row);  // so that addresses are not kept in registers
    row += work.q0;
    Element* const out = rows_of<Element>(p.out, p.out_at, work.entry(), work.h);
    return {{out + (i64(work.q_start) + row) * p.out_at.n, p.out_at.n, work.Nq(p) - row, int(p.Dv)},
            lse_of(p, work) + row};
}

// A consumer warpgroup. It takes the next work tile when it has stored the results of this one: the other
// warpgroups compute meanwhile.
__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    const RowGroup rows(16);
    const int row0 = rows.row0 % WARPGROUP_ROWS;  // first row of this warp in its warpgroup
    const bool leader = threadIdx.x % WARPGROUP == 0;
    PipelineState<Q_STAGES> q_pipe{warpgroup};
    PipelineState<2> work_pipe;
    PipelineState<STAGES> k_pipe, v_pipe;

    WorkTile work{};
    int tile = 0;  // with a tile list, an index into it
    KeyTileList list;
    TileEntry entry, next_entry;
    float q_inverse[2];
    SplitSums<HEAD_DIM, NT> sums;
    Scores<false, 1, NT> s(0, 0);
    DenseMask<false, 1, NT> dense;
    const WarpBias<false, 1, NT> bias(smem.bias());
    SplitOperand<BLOCK_K / 16> probs;
    Fragment<Accum, 1, VT> acc;
    RowState<1> state;
    LongSums<1> long_sums{};

    // One thread arrives: the GEMM that reads the stage belongs to the whole warpgroup, and is complete.
    auto release_k = [&] {
        if (leader) smem.k_empty(k_pipe.stage).arrive();
        k_pipe.advance();
    };
    auto release_v = [&] {
        if (leader) smem.v_empty(v_pipe.stage).arrive();
        v_pipe.advance();
    };
    auto zero_past_end = [&] {
        const int last = HAS_TILE_LIST ? entry.tile() : tile, length = work.window.length;
        const int begin = length - last * BLOCK_K;  // positive: each tile has a key before the end
        const bool is_array_end = work.k_start + length >= p.Nk;
        if (!__any_sync(~0u, begin < BLOCK_K && !is_array_end)) return;
        zero_rows(smem.v(v_pipe.stage), begin);
        fence_async_shared();
        named_barrier_sync<WARPGROUP>(smem.warpgroup_barrier(warpgroup));
    };
    // Skip tiles that only other warpgroups attend to.
    auto skip_tiles = [&](int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            smem.k_full(k_pipe.stage).wait(k_pipe.phase);
            smem.v_full(v_pipe.stage).wait(v_pipe.phase);
            named_barrier_sync<WARPGROUP>(smem.warpgroup_barrier(warpgroup));
            release_k();
            release_v();
        }
    };
    auto fetch_work = [&] {
        smem.q_full(warpgroup, work_pipe.stage).wait(work_pipe.phase);
        work_pipe.advance();
        work = smem.storage.work_tiles[q_pipe.stage];
        smem.q_empty(q_pipe.stage).arrive();  // all threads have copied it
        q_pipe.advance(CONSUMERS);
        if (work.tiles.begin >= work.tiles.end || work.is_end) work.tiles.begin = work.tiles.end = work.end;
    };
    auto load_mask_and_bias = [&](int column) {
        const int row = work.q0 + row0;
        if constexpr (HAS_MASK) dense.load(AttentionMask(p, work.sequence(p), work.h), row, column);
        if constexpr (HAS_BIAS) bias.load(ScoreMod(p, work.b, work.h), row, column);
    };
    auto modify_and_mask = [&](bool partial) {
        const ScoreMod score_mod(p, work.b, work.h);
        const AttentionMask attn_mask(p, work.sequence(p), work.window, work.h);
        s.row = work.q0 + row0, s.column = (HAS_TILE_LIST ? entry.tile() : tile) * BLOCK_K;
        hide(s.row);  // so that the windows of rows are not kept in registers
        if constexpr (HAS_BIAS) copy_wait<0>(), __syncwarp();
        s.apply(score_mod, bias, [](int, int, int, Accum, Accum) {});
        if (partial) s.masked_fill_positions(attn_mask);
        if constexpr (HAS_MASK) dense.share(), s.masked_fill(dense);
        if (tile + 1 < work.tiles.end) load_mask_and_bias((HAS_TILE_LIST ? next_entry.tile() : tile + 1) * BLOCK_K);
    };
    auto online_softmax = [&](Accum softmax_scale_log2) {
        Accum rescale[1][2], sums[1][2];
        if constexpr (SHIFT_FROM_SUMS) {
            if (state.template update_by_sums<RESCALE_THRESHOLD>(s, softmax_scale_log2, rows, sums)) {
                state.template raise_shifts<RESCALE_THRESHOLD>(s, rows, sums, rescale);
                acc.scale_rows(0, rescale[0]), long_sums.scale(rescale);
            } else {
                state.add_sums(sums);
            }
        } else {
            state.template update<RESCALE_THRESHOLD, RowMaxMode::BOUNDED>(s, softmax_scale_log2, rows, rescale);
            acc.scale_rows(rescale), long_sums.scale(rescale);
        }
    };

    for (fetch_work(); !work.is_end; fetch_work()) {
        tile = work.tiles.begin;
        skip_tiles(tile - work.begin);
        load_queries(p, work, smem.q(warpgroup), q_inverse);
        fence_async_shared();
        named_barrier_sync<WARPGROUP>(smem.warpgroup_barrier(warpgroup));
        state = RowState<1>(false);
        acc.clear();
        long_sums = {};
        const i64 factors =
            first_factor(p, p.Hkv, p.Nk, work.entry(), work.h / int(p.group), work.k_start, work.b);
        float farthest = 0;  // inverse factor of a tile of keys
        if constexpr (HAS_TILE_LIST) list = KeyTileList(p, work), next_entry = list.entry(tile);
        if (tile < work.tiles.end) load_mask_and_bias((HAS_TILE_LIST ? next_entry.tile() : tile) * BLOCK_K);
#pragma unroll 1
        for (; tile < work.tiles.end; ++tile) {
            if constexpr (HAS_TILE_LIST) entry = next_entry, next_entry = list.entry(tile + 1);
            const int place = HAS_TILE_LIST ? entry.tile() : tile;
            const bool partial = work.tiles.is_partial(place) || (HAS_TILE_LIST && entry.is_partial());
            const i64 factor = factors + place / (TILE_ROWS / BLOCK_K);
            const float k_inverse = p.k_factors[factor], v_inverse = p.v_factors[factor];
            smem.k_full(k_pipe.stage).wait(k_pipe.phase);
            sums.issue(smem.q(warpgroup), smem.k(k_pipe.stage));
            sums.template wait<0>();
            release_k();
            farthest = maximum_or_nan(farthest, k_inverse);
            sums.join(s, {q_inverse[0] * k_inverse, q_inverse[1] * k_inverse});
            modify_and_mask(partial);
            online_softmax(ScoreMod(p, work.b, work.h).softmax_scale_log2());
            if constexpr (HAS_DROPOUT) {
                const Dropout dropout(p, work.b, work.h);
#pragma unroll
                for (int n = 0; n < NT; n += 2) s.drop(dropout, n);
            }
            probs.split(s, {1, 1});
            smem.v_full(v_pipe.stage).wait(v_pipe.phase);
            if (tile + 1 == work.tiles.end) zero_past_end();
            add_split_product<PV_ATOMS>(acc, probs, smem.v(v_pipe.stage), {v_inverse, v_inverse});
            release_v();
            const int done = tile + 1 - work.tiles.begin;
            if (done % GROUP_TILES == 0 && tile + 1 < work.tiles.end)
                long_sums.add_total(results_of(p, work), state, acc, done > GROUP_TILES, false);
        }
        if (work.tiles.end - work.tiles.begin > GROUP_TILES)
            long_sums.add_total(results_of(p, work), state, acc, true, true);
        skip_tiles(work.end - work.tiles.end);

        bool good = acc.all_finite() & state.all_bounded();
        state.reduce_sums(rows);
        const Lane lane;
        const RowResults results = results_of(p, work);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            good = good && keeps_digits(p, q_inverse[half], farthest);
            Accum lse;
            const Accum weight = state.finalize(0, half, sink_of(p, work.h),
                                                HAS_DROPOUT ? Accum(p.dropout_scale) : Accum(1),
                                                Accum(p.softmax_scale), lse);
#pragma unroll
            for (auto& atom : acc.x[0]) atom[2 * half] *= weight, atom[2 * half + 1] *= weight;
            const int i = lane.row(2 * half);
            if (lane.t == 0 && i < results.out.rows) results.lse[i] = lse;
        }
        results.out.store(acc);
        if (!__all_sync(~0u, good) && threadIdx.x % WARP == 0) fail_query_head(p, work.b, work.h);
    }
}

// Producers need more registers to find packed sequences.
using Share = Registers<PACKED ? 32 : 24>;

extern "C" __global__ void __launch_bounds__((WARPGROUPS + 1) * WARPGROUP, MIN_BLOCKS_PER_SM)
    forward_float32_sm90(const __grid_constant__ Params p, const __grid_constant__ KeyMaps maps) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage[GROUPS];
    const int warpgroup = warpgroup_index();
    const Smem smem(tensors, storage, 0);
    set_up(smem, maps);
    wait_for_prerequisites();
    __syncthreads();
    if (warpgroup == WARPGROUPS) {
        reg_dealloc<Share::PRODUCER>();
        const WorkOrder<> order(p, 0);
        const int warp = uniform(threadIdx.x % WARPGROUP / WARP);
        if (warp == 0) {
            if (is_first_lane()) produce(p, maps, smem, order);
        } else if (HAS_SCHEDULER && warp == 1) {
            if (is_first_lane()) schedule(p, smem, order);
        }
    } else {
        reg_alloc<Share::CONSUMER>();
        consume(p, smem, warpgroup);
        if (threadIdx.x % WARPGROUP == 0) smem.pass_done().arrive();
    }
}
