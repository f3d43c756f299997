// Forward pass on Hopper: FlashAttention-3, with TMA, wgmma and warp specialisation. A producer
// warp loads q, k and v into circular buffers; two or three consumer warpgroups compute 64 queries
// each. A producer and its consumers are a group. A CTA has one group or several, which share only the
// SM. CTAs are persistent. Mirrors forward_block in spec.py. Shah et al., FlashAttention-3,
// arXiv:2407.08608.
//
// With SPLIT_KV the rows are the queries of all heads that share a key head, and a work tile has one split of
// the keys. With several splits the results are partial sums that forward_combine, or forward_fold with
// INVARIANT, joins: as in forward_split.
//
// Each group goes through its work tiles up to three times. A row is large if its maximum is beyond 2**12
// in units of log 2: then the maximum is subtracted from the scores before they are scaled.
//
//     pass  work tiles                  rows treated as large       stores         marks work tiles
//     1     all, or stops early         none                        all rows       see below
//     2     marked by 1, or not begun   maximum > 2**12             all rows       with rows < -2**12
//     3     marked by 2                 all                         rows < -2**12  -
//
// Pass 1 marks a work tile if its output is not finite, if a maximum is beyond 2**12, or if a maximum
// rises so much in one tile that exponentials overflow. Pass 1 stops once several work tiles are marked.
// Passes 2 and 3 are NaN-safe: values that are not finite are taken out of partial tiles, and added back
// to the rows that attend to them.
//
// When pass 1 stops depends on timing, but the bits of a row must not. So the arithmetic of a row depends
// only on its own scores: a row is large if its maximum over all keys is. A running maximum above 2**12
// never falls, so pass 2 knows. A running maximum below -2**12 may still rise, so only pass 3 knows.
#include "fwd_mainloop_sm90.cuh"

// Skip the row maximum: keep the maximum of the first tile as the softmax shift, and raise it only when a
// lane's sum of exponentials exceeds 2**RESCALE_THRESHOLD (update_by_sums). Row maxima take a fifth of the
// instructions of a tile. Off with score modifiers: ALiBi raises the maximum in every tile, and a bias may
// raise it by any amount.
constexpr bool SHIFT_FROM_SUMS = FOLD;

// Release q after the last QK instead of after the last softmax, if the queries of the next work tile wait
// for its stage.
constexpr bool RELEASES_Q_EARLY = Q_STAGES < 2 * CONSUMERS;

// Columns of atoms whose scores are modified and masked at a time. score_mod and mask_mod need registers.
constexpr int CHUNK = HAS_SCORE_MOD || HAS_MASK_MOD ? 8 : NT;
constexpr bool CHUNKED = CHUNK < NT;

// The number of columns of atoms to compute, as a type: the whole tile, or its first half. Most tiles have
// twice as many keys as a warpgroup has rows. So with a causal mask the second half of the last tile is
// masked out for every second warpgroup, which then computes QK, softmax and PV of the first half only.
// Masked-out keys have P = 0, so the whole tile would give the same bits.
template <int N>
struct Columns {
    static constexpr int COUNT = N;
};
constexpr bool HAS_HALVES = SHIFT_FROM_SUMS && !HAS_TILE_LIST && BLOCK_K == 2 * WARPGROUP_ROWS;
constexpr Columns<NT> WHOLE;
constexpr Columns<HAS_HALVES ? NT / 2 : NT> HALF;

// Where a consumer warpgroup is in the circular buffers.
struct ReadState {
    PipelineState<Q_STAGES> q;
    PipelineState<2> work;
    PipelineState<STAGES> k, v;
};

// A consumer warpgroup: compute the work tiles of the first pass, or of the two NaN-safe passes.
template <bool NAN_SAFE>
__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup, ReadState& read) {
    const RowGroup rows(16);
    const int row0 = rows.row0 % WARPGROUP_ROWS;  // first row of this warp in its warpgroup
    const bool leader = threadIdx.x % WARPGROUP == 0;
    PipelineState<Q_STAGES> q_pipe = read.q;
    PipelineState<2> work_pipe = read.work;
    PipelineState<STAGES> k_pipe = read.k, v_pipe = read.v;

    WorkTile work{}, next;
    int loaded_row = -1;  // with SPLIT_KV the first row in the q stage, an index among all rows
    int tile = 0;  // with a tile list, an index into it
    KeyTileList list;
    TileEntry entry, next_entry;
    Scores<false, 1, NT> s(0, 0);
    DenseMask<false, 1, NT> dense;
    const WarpBias<false, 1, NT> bias(smem.bias());
    Atom<Element>::A probs[BLOCK_K / 16];  // P as an operand of PV
    Fragment<Accum, 1, VT> acc;
    RowState<1> state;
    Accum rescale[1][2];
    Accum sums[1][2];
    bool needs_rescale = false;  // a sum is so large that its shift must rise

    // All 128 threads arrive: the producer overwrites work_tiles[stage] with plain stores, so every
    // thread must have copied it. Only wgmma reads q, and all of it has been waited for. In a NaN-safe
    // pass the arrive also publishes mark_redo to the producer.
    auto release_q = [&] { smem.q_empty(q_pipe.stage).arrive(); };
    // One thread arrives: the GEMM that reads the stage belongs to the whole warpgroup, and is complete.
    // The NaN-safe path also reads and writes v with plain instructions, and fences them itself.
    auto release_k = [&] {
        if (leader) smem.k_empty(k_pipe.stage).arrive();
        k_pipe.advance();
    };
    auto release_v = [&] {
        if (leader) smem.v_empty(v_pipe.stage).arrive();
        v_pipe.advance();
    };
    const auto q_tile = [&] { return smem.q(SPLIT_KV ? warpgroup : q_pipe.stage); };
    auto issue_qk = [&](auto columns) {
        gemm_async<Element, HEAD_DIM>(atoms<columns.COUNT>(s, 0), q_tile(), 0, smem.k(k_pipe.stage));
    };
    // The V stage of the last PV of a work tile, or -1. It is released when the next work tile has
    // started, or before tiles are skipped, since those may need the stage.
    int last_pv_stage = -1;
    auto release_last_pv = [&] {
        if (leader && last_pv_stage >= 0) smem.v_empty(last_pv_stage).arrive();
        last_pv_stage = -1;
    };
    auto convert_p = [&](auto columns) {
        const Dropout dropout(p, work.b, work.h);
#pragma unroll
        for (int i = 0; i < columns.COUNT / 2; ++i) {
            if constexpr (HAS_DROPOUT && !NAN_SAFE) {
                hide(s.row), hide(s.column);
                s.drop(dropout, 2 * i);
                order_after(s.x[0][2 * i][0] < 0);
            }
            probs[i] = Atom<Element>::a_of(s.x[0] + 2 * i);
        }
    };

    // Zero the values of the last tile that are past the end of the keys. P is 0 there, but 0 x NaN is
    // NaN, and the tail of a cache may hold anything. TMA has zeroed values past the end of the array.
    // Each warpgroup does this for its own GEMM; the others store the same zeros.
    auto zero_past_end = [&] {
        const int last = HAS_TILE_LIST ? entry.tile() : tile - 1, length = work.window.length;
        const int begin = length - last * BLOCK_K;  // positive: each tile has a key before the end
        const bool is_array_end = !PAGED && work.k_start + length >= p.Nk;
        if (!__any_sync(~0u, begin < BLOCK_K && !is_array_end)) return;
        zero_rows(smem.v(v_pipe.stage), begin);
        fence_async_shared();
        named_barrier_sync<WARPGROUP>(smem.warpgroup_barrier(warpgroup));
    };

    // Skip tiles that only other warpgroups attend to.
    auto skip_tiles = [&](int count) {
        if (!NAN_SAFE && count > 0) wgmma_wait<0>(), release_last_pv();
#pragma unroll 1
        for (; count > 0; --count) {
            smem.k_full(k_pipe.stage).wait(k_pipe.phase);
            smem.v_full(v_pipe.stage).wait(v_pipe.phase);
            // The warps may have drifted apart: no GEMM has synchronised them.
            named_barrier_sync<WARPGROUP>(smem.warpgroup_barrier(warpgroup));
            release_k();
            release_v();
        }
    };
    // True if the tile needs a mask. Also loads the next entry of a tile list.
    auto is_partial = [&] {
        if constexpr (!HAS_TILE_LIST) return work.tiles.is_partial(tile);
        entry = next_entry, next_entry = list.entry(tile + 1);
        return entry.is_partial() || work.tiles.is_partial(entry.tile());
    };
    // Start to load the mask and bias of a tile. The previous tile's have been read.
    auto load_mask_and_bias = [&](int column) {
        const int row = work.q0 + row0;
        if constexpr (HAS_MASK) dense.load(AttentionMask(p, work.sequence(p), work.h), row, column);
        if constexpr (HAS_BIAS) bias.load(ScoreMod(p, work.b, work.h), row, column);
    };
    // With TOTALS the consumers go through a work tile part by part, as if each were a work tile. The q stage is
    // released with the last part.
    auto fetch_work = [&] {
        const bool is_new = !work.continues;
        if (is_new) {
            smem.q_full(warpgroup, work_pipe.stage).wait(work_pipe.phase);
            work_pipe.advance();
        }
        next = smem.storage.work_tiles[q_pipe.stage];
        if (!is_new) next.begin = next.tiles.begin = work.tiles.end;
        if (next.tiles.begin >= next.tiles.end || next.is_end)
            next.tiles.begin = next.tiles.end = next.end;
        if constexpr (TOTALS) cut_to_part(p, next, !is_new);
    };
    auto start_work = [&] {
        work = next;
        tile = work.tiles.begin;
        if (!work.is_end) skip_tiles(tile - work.begin);
        // QK is issued even if there is no tile, on whatever the stage holds, and so is the last PV:
        // if they were conditional, ptxas would serialise all GEMMs.
        if constexpr (HAS_TILE_LIST) {
            list = KeyTileList(p, work);
            next_entry = list.entry(tile);
        }
        // Successive splits mostly have the same rows. All GEMMs that read the previous rows are complete.
        const int row = SPLIT_KV ? (work.b * int(p.Hq) + work.h) * int(p.Nq) + work.q0 : 0;
        if (SPLIT_KV && !work.is_end && row != loaded_row) {
            loaded_row = row;
            load_shared_rows(p, work, q_tile());
            named_barrier_sync<WARPGROUP>(smem.warpgroup_barrier(warpgroup));
        }
        if (tile < work.tiles.end) smem.k_full(k_pipe.stage).wait(k_pipe.phase);
        issue_qk(WHOLE);
        if (tile < work.tiles.end)
            load_mask_and_bias((HAS_TILE_LIST ? next_entry.tile() : tile) * BLOCK_K);
    };
    auto modify_and_mask = [&](auto columns, bool partial) {
        const ScoreMod score_mod(p, work.b, work.h);
        const AttentionMask attn_mask(p, work.sequence(p), work.window, work.h);
        s.row = work.q0 + row0, s.column = (HAS_TILE_LIST ? entry.tile() : tile) * BLOCK_K;
        if constexpr (HAS_BIAS) copy_wait<0>(), __syncwarp();
        constexpr int COUNT = columns.COUNT;
#pragma unroll
        for (int n = 0; n < COUNT; n += CHUNK) {
            const int end = n + CHUNK < COUNT ? n + CHUNK : COUNT;
            begin_chunk<CHUNKED>(s);
            s.apply(score_mod, bias, [](int, int, int, Accum, Accum) {}, n, end);
            if (partial) s.masked_fill_positions(attn_mask, n, end);
            end_chunk<CHUNKED>(s, end, infinity<Accum>());
        }
        if constexpr (HAS_MASK) dense.share(), s.masked_fill(dense);
        const int ahead = HAS_TILE_LIST ? next_entry.tile() : tile + 1;
        if (tile + 1 < work.tiles.end) load_mask_and_bias(ahead * BLOCK_K);
    };
    auto online_softmax = [&](auto columns) {
        const Accum softmax_scale_log2 = ScoreMod(p, work.b, work.h).softmax_scale_log2();
        if constexpr (SHIFT_FROM_SUMS && !NAN_SAFE) {
            needs_rescale = state.template update_by_sums<RESCALE_THRESHOLD>(
                atoms<columns.COUNT>(s, 0), softmax_scale_log2, rows, sums);
        } else {
            constexpr RowMaxMode MODE = NAN_SAFE ? RowMaxMode::DETECT_LATE : RowMaxMode::BOUNDED;
            state.template update<RESCALE_THRESHOLD, MODE, SHIFT_FROM_SUMS>(s, softmax_scale_log2, rows,
                                                                    rescale);
        }
    };
    // Called once, but inlining it by hand makes other machine code with NVRTC 13.5.
    auto softmax = [&](auto columns, bool partial) {
        release_k();
        if (RELEASES_Q_EARLY && tile + 1 == work.tiles.end && !work.continues) release_q();
        modify_and_mask(columns, partial);
        online_softmax(columns);
    };
    // Softmax of tile j overlaps PV of tile j - 1. Before the first tile there is no PV, and the waits
    // for it do nothing.
    //
    //     finish_tile, issue_gemms   GEMMs in flight      stages held
    //     wait QK, release k         PV                   v(j - 1)
    //     mask, softmax              PV                   v(j - 1)
    //     wait PV, release v         -                    -
    //     rescale O, convert P       -                    -
    //     issue QK of j + 1          QK                   k(j + 1)
    //     issue PV of j              QK, PV               k(j + 1), v(j)
    auto finish_tile = [&](auto columns, bool partial) {
        auto& scores = atoms<columns.COUNT>(s, 0);
        warpgroup_wait<1>(scores);
        softmax(columns, partial);
        order_after(SHIFT_FROM_SUMS ? needs_rescale : state.l[0][0] + state.l[0][1] < 0);
        warpgroup_wait<0>(acc);
        if (tile > work.tiles.begin) release_v();
        if constexpr (!SHIFT_FROM_SUMS) {
            acc.scale_rows(rescale);
        } else if (needs_rescale) {
            state.template raise_shifts<RESCALE_THRESHOLD>(scores, rows, sums, rescale);
            acc.scale_rows(0, rescale[0]);
        } else {
            state.add_sums(sums);
        }
        convert_p(columns);
        ++tile;
    };
    auto issue_gemms = [&](auto columns) {
        smem.k_full(k_pipe.stage).wait(k_pipe.phase);
        issue_qk(columns);
        smem.v_full(v_pipe.stage).wait(v_pipe.phase);
        gemm_async<Element>(acc, probs, smem.v(v_pipe.stage));
    };
    // The warpgroups go through the same tiles in lockstep, and clean the values of partial tiles
    // together. The table of values that were not finite takes the k stage, once all warpgroups have
    // computed their scores.
    auto nan_safe_loop = [&] {
        for (;;) {
            const bool partial = __any_sync(~0u, is_partial() || HAS_ANY_SCORES || HAS_MASK);
            modify_and_mask(WHOLE, partial);
            const NonFinite<Element, BLOCK_K, VALUE_DIM> table{smem.k(k_pipe.stage).address};
            Attended<1, NT> attended;
            bool any = false;
            smem.v_full(v_pipe.stage).wait(v_pipe.phase);
            if (partial) {
                attended.mark(s);
                named_barrier_sync<CONSUMER_THREADS>(smem.consumer_barrier());
                const int warp = rows.warp_m - smem.group * WARPS_M;
                any = table.clean<CONSUMER_THREADS / WARP>(smem.v(v_pipe.stage), warp);
                fence_async_shared();
                any = named_barrier_or<CONSUMER_THREADS>(smem.consumer_barrier(), any);
            }
            online_softmax(WHOLE);
            s.scale(1 / P_DIVISOR);
            const Dropout dropout(p, work.b, work.h);
#pragma unroll
            for (int n = 0; n < NT; n += 2)
                s.drop(dropout, n, [&](int m, int n, int e) { attended.drop(m, n, e); });
            convert_p(WHOLE);
            acc.scale_rows(rescale);
            gemm_async<Element>(acc, probs, smem.v(v_pipe.stage));
            warpgroup_wait<0>(acc);
            if (__any_sync(~0u, any)) {
                add_non_finite(acc, table, 0,
                               [&](int m, int half, int w) { return attended.word(m, half, w); });
                // All reads and writes of both stages are done and fenced before TMA refills them.
                fence_async_shared();
                named_barrier_sync<CONSUMER_THREADS>(smem.consumer_barrier());
            }
            release_k();
            release_v();
            if (++tile == work.tiles.end) return;
            smem.k_full(k_pipe.stage).wait(k_pipe.phase);
            issue_qk(WHOLE);
            warpgroup_wait<0>(s);
        }
    };

    // When a work tile begins, its first QK is in flight. The first QK of the next work tile runs
    // beside the last PV and the epilogue of this one.
    fetch_work();
    start_work();
    while (!work.is_end) {
        state = RowState<1>(NAN_SAFE && work.all_max_first);
        acc.clear();
        warpgroup_wait<0>(s);
        const bool empty = tile == work.tiles.end;
        if constexpr (NAN_SAFE) {
            if (!empty) nan_safe_loop();
            // This comes before the arrive on q_empty, which publishes it to the producer.
            if (__any_sync(~0u, !work.all_max_first && state.below(-LARGE_ROW_MAX)))
                smem.mark_redo(1, work.iteration);
        } else if (!empty) {
            const int end = work.tiles.end - (HAS_HALVES && work.tiles.ends_in_half);
#pragma unroll 1
            for (;;) {
                finish_tile(WHOLE, is_partial());
                if (tile >= end) break;
                issue_gemms(WHOLE);
            }
            if (HAS_HALVES && tile < work.tiles.end) {
                issue_gemms(HALF);
                wgmma_wait<0>();  // if PV overlapped softmax here, ptxas would serialise all GEMMs
                finish_tile(HALF, true);
            }
            smem.v_full(v_pipe.stage).wait(v_pipe.phase);
            zero_past_end();
            last_pv_stage = v_pipe.stage;
        } else {
            // Operands of a PV whose result is discarded. Unset, they would stay live from tile to tile.
            for (auto& a : probs)
                for (u32& r : a.r) r = 0, hide(r);
        }
        if (!work.continues) {
            if (NAN_SAFE || !RELEASES_Q_EARLY || empty) release_q();
            q_pipe.advance(CONSUMERS);
        }
        if constexpr (!NAN_SAFE) {
            if (HAS_HALVES && work.tiles.ends_in_half)
                gemm_async<Element>(acc, probs, smem.v(v_pipe.stage), 0, BLOCK_K / 32);
            else
                gemm_async<Element>(acc, probs, smem.v(v_pipe.stage));
        }
        if (last_pv_stage >= 0) v_pipe.advance();
        fetch_work();
        const WorkTile done = work;
        skip_tiles(done.end - done.tiles.end);
        start_work();
        if constexpr (!NAN_SAFE) {
            warpgroup_wait<1>(acc);
            release_last_pv();
            if (empty) {
                acc.clear();
                fence_operand(accum_registers(acc));  // makes a branch, not a select for each number
            }
        }
        epilogue<NAN_SAFE>(p, smem, done, done.q0 + row0, state, acc);
    }
    warpgroup_wait<0>(s);
    release_q();
    q_pipe.advance(CONSUMERS);
    read = {q_pipe, work_pipe, k_pipe, v_pipe};
}

using Maps = LoadedMaps<GATHERED>::Type;

// Producers need more registers to find splits, packed sequences and pages.
using Share = Registers<SPLIT_KV ? 40 : PACKED || PAGED ? 32 : 24>;

extern "C" __global__ void __launch_bounds__((WARPGROUPS + 1) * WARPGROUP, MIN_BLOCKS_PER_SM)
    forward_sm90(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage[GROUPS];
    // The producer warpgroup is divided among the groups of the CTA, by whole warps.
    constexpr int UNIT = WARPGROUP / GROUPS;  // threads that produce for a group
    const int unit = uniform(threadIdx.x / UNIT), index = unit / GROUPS;
    const bool produces = index == WARPGROUPS;
    const int group = GROUPS == 1 ? 0 : produces ? unit % GROUPS : index / CONSUMERS;
    const Smem smem(tensors, storage, group);
    set_up(smem, maps);
    wait_for_prerequisites();
    if constexpr (SPLIT_KV) launch_dependents();
    __syncthreads();
    if (produces) {
        reg_dealloc<Share::PRODUCER>();
        const WorkOrder<> order(p, group);
        const int warp = uniform(threadIdx.x % UNIT / WARP);
        if (warp == 0) {
            if (is_first_lane()) {
                produce(p, maps, smem, order);
                smem.send({0, -1});
            }
        } else if (HAS_SCHEDULER && warp == 1) {
            if (is_first_lane()) schedule(p, smem, order);
        } else if (GATHERED && warp > HAS_SCHEDULER) {
            gather(p, smem, warp - 1 - HAS_SCHEDULER);
        }
    } else {
        reg_alloc<Share::CONSUMER>();
        const int warpgroup = index - group * CONSUMERS;
        ReadState read{{warpgroup}};
        consume<false>(p, smem, warpgroup, read);
        // All threads have marked their unfinished work tiles.
        named_barrier_sync<WARPGROUP>(smem.warpgroup_barrier(warpgroup));
        if (threadIdx.x % WARPGROUP == 0) smem.pass_done().arrive();
        smem.pass_done().wait(0);
        if (__any_sync(~0u, smem.any_redo(0))) consume<true>(p, smem, warpgroup, read);
    }
}
