// Forward pass on Hopper: FlashAttention-3, with TMA, wgmma and warp specialisation. A producer
// warp loads q, k and v into circular buffers; two or three consumer warpgroups compute 64 queries
// each. CTAs are persistent. Mirrors forward_block in spec.py. Shah et al., FlashAttention-3,
// arXiv:2407.08608.
//
// A probability of zero does not mask out a NaN: one in v reaches queries that do not attend to it,
// in partial tiles. So work tiles whose output is not finite are done again in a second, NaN-safe
// pass: values that are not finite are taken out of partial tiles, and added back where they are
// attended to. So are work tiles whose scores are too large for the exponents of the first pass.
//
// The first pass stops early once several work tiles are unfinished. When that is noticed is a
// matter of timing, and the bits of a row must not be. So the arithmetic of a row depends on its
// own scores alone: a row is large if its maximum over all keys is. A running maximum above
// LARGE_ROW_MAX never falls, so the second pass lets such a row turn large at once. One below
// -LARGE_ROW_MAX may rise. The second pass takes such a row for ordinary, as the first does. If it
// has not risen in the end, the work tile is done again in a third pass, in which all rows are
// large, and which stores only rows that are far below zero.
#include "fwd_smem_sm90.cuh"
#include "head.cuh"
#include "nonfinite.cuh"
#include "softmax.cuh"

constexpr int NT = BLOCK_K / 8, VT = VALUE_DIM / 8;

// Registers of a thread: the producer warpgroup gives its own to the consumers.
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;

// Lazy rescaling: row maxima may lag by so many powers of two before O is rescaled. P in 16 bits
// has room for it, and the result depends on it by rounding alone.
constexpr int RESCALE_THRESHOLD = 8;

// Sums of large numbers may overflow for that. A NaN-safe pass divides P by a power of two, which
// makes it 1 at most. The bits are those of the first pass, unless a probability below 2**-118,
// whose quotient has fewer digits, shows in them.
constexpr Accum P_DIVISOR = HAS_FINITE_SUMS<Element> ? Accum(1) : Accum(1 << RESCALE_THRESHOLD);

// Whether PV overlaps the softmax of its own warpgroup. At a value head dimension of 128 the GEMMs
// of the other warpgroup fill that time as well or better (measured).
constexpr bool INTRA_WARPGROUP_OVERLAP = VALUE_DIM != 128;

struct Maps {
    TensorMap q, k, v;
};

// The producer thread: load all that the work tiles need, in the order of its use, and publish
// them.
__device__ inline void produce(const Params& p, const Maps& maps, const Smem& smem) {
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<2> work_pipe;
    PipelineState<STAGES> k_pipe, v_pipe;
    WorkTile work{};
    // Publish to each warpgroup its share of the work tile, with its queries.
    auto publish_work = [&] {
#pragma unroll 1
        for (int warpgroup = 0; warpgroup < CONSUMERS; ++warpgroup, q_pipe.advance()) {
            smem.q_empty(q_pipe.stage).wait(q_pipe.phase ^ 1);
            WorkTile& share = smem.storage.work_tiles[q_pipe.stage];
            const Barrier full = smem.q_full(warpgroup, work_pipe.stage);
            share = work;
            if (work.is_end) {
                full.arrive();
                continue;
            }
            share.q0 += WARPGROUP_ROWS * warpgroup;
            // In a NaN-safe pass the warpgroups go through the same tiles side by side.
            if (!work.nan_safe) share.tiles = key_tiles(p, work.b, share.q0, WARPGROUP_ROWS);
            if (HAS_BLOCK_MASK) share.tiles.begin = work.begin, share.tiles.end = work.end;
            smem.q(q_pipe.stage).load(maps.q, share.q0, work.h, work.b, full);
        }
        work_pipe.advance();
    };
    auto tile_at = [&](int index) {
        return HAS_BLOCK_MASK ? BlockSparseList(p, work).entries[index] / 2 : index;
    };
    auto load_k = [&](int index) {
        const int tile = tile_at(index);
        const Barrier full = smem.k_full(k_pipe.stage);
        smem.k_empty(k_pipe.stage).wait(k_pipe.phase ^ 1);
        smem.k(k_pipe.stage).load(maps.k, tile * BLOCK_K, work.h / int(p.group), work.b, full);
        k_pipe.advance();
    };
    auto load_v = [&](int index) {
        const int tile = tile_at(index);
        const Barrier full = smem.v_full(v_pipe.stage);
        smem.v_empty(v_pipe.stage).wait(v_pipe.phase ^ 1);
        smem.v(v_pipe.stage).load(maps.v, tile * BLOCK_K, work.h / int(p.group), work.b, full);
        v_pipe.advance();
    };
    // The next work tile is computed while the first tiles of this one load. Where several work
    // tiles are unfinished, the others hardly will be better: the second pass takes over what is
    // left.
    int begun = 0;  // iterations of the first pass
    auto run_pass = [&](int pass) {
        int iteration = 0;
        auto find = [&](WorkTile& work) {
#pragma unroll 1
            while (get_work(p, iteration, work)) {
                if (pass == 0 || (pass == 1 && iteration >= begun)) return true;
                if (smem.unfinished(pass - 1, iteration)) return true;
                ++iteration;
            }
            return false;
        };
        for (bool found = find(work); found;) {
            if (pass == 0 && smem.many_unfinished(0)) break;
            if (work.begin < work.end) load_k(work.begin);
            work.nan_safe = pass > 0, work.all_large = pass > 1;
            publish_work();
            WorkTile next = work;
            ++iteration;
            if (pass == 0) begun = iteration;
            found = find(next);
            if (found && Q_STAGES < 2 * CONSUMERS)
#pragma unroll 1
                for (int row = 0; row < BLOCK_Q; row += WARPGROUP_ROWS)
                    QueryTile::prefetch(maps.q, next.q0 + row, next.h, next.b);
#pragma unroll 1
            for (int tile = work.begin; tile < work.end; ++tile) {
                if (tile + 1 < work.end) load_k(tile + 1);
                load_v(tile);
            }
            work = next;
        }
    };
    auto publish_end = [&] {
        work.is_end = true;
        publish_work();
        work.is_end = false;
    };
    run_pass(0);
    publish_end();
    smem.pass_done().wait(0);
    if (!smem.any_unfinished(0)) return;
    // To the consumers the NaN-safe passes are one. They mark work tiles before they release q:
    // once all q stages are released, the third pass knows what it has to do.
#pragma unroll 1
    for (int pass = 1; pass < 3 && smem.any_unfinished(pass - 1); ++pass) {
        run_pass(pass);
        PipelineState<Q_STAGES> each = q_pipe;
#pragma unroll 1
        for (int stage = 0; stage < Q_STAGES; ++stage, each.advance())
            smem.q_empty(each.stage).wait(each.phase ^ 1);
    }
    publish_end();
}

__device__ inline Accum* lse_of(const Params& p, const WorkTile& work) {
    return static_cast<Accum*>(p.lse) + (i64(work.b) * p.Hq + work.h) * p.Nq;
}

// Normalise and store 16 rows of each warp from row0 on, and their lse. The third pass stores only
// rows far below zero. Others keep their bits, also in work tiles that are done for sharing a bit
// with a marked one. Its maxima differ by up to the threshold from those of the second: with twice
// that as a margin, each row that is stored would have had its work tile marked.
template <bool NAN_SAFE>
__device__ inline void epilogue(const Params& p, const Smem& smem, const WorkTile& work, int row0,
                                RowState<1>& state, Fragment<Accum, 1, VT>& acc) {
    u32 halves = 3;
    if constexpr (NAN_SAFE) {
        if (work.all_large)
            halves = state.below(-LARGE_ROW_MAX - 2 * RESCALE_THRESHOLD,
                                 ScoreMod(p, work.b, work.h).softmax_scale_log2());
    } else {
        // A value that is not finite spoils its column in all rows: half of them are enough. A sum
        // that overflows is one row's.
        const bool good =
            all_finite_by_fma<HAS_FINITE_SUMS<Element> ? 2 : 4, 2>(acc) && state.all_bounded();
        if (!__all_sync(~0u, good)) smem.mark_unfinished(0, work.iteration);
    }
    const Accum sink = sink_of(p, work.h);
    state.reduce_sums(RowGroup(16));
    Accum lse[2], inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        inverse[half] = state.template finalize<true>(
            0, half, sink, NAN_SAFE ? P_DIVISOR : Accum(1), Accum(p.softmax_scale), lse[half]);
#pragma unroll
        for (int n = 0; n < VT; ++n)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) acc.x[0][n][e] *= inverse[half];
    }
    const Lane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = row0 + lane.row(2 * half);
        if (lane.t == 0 && i < p.Nq && (!NAN_SAFE || halves >> half & 1))
            lse_of(p, work)[i] = lse[half];
    }
    store_rows(rows_of<Element>(p.out, p.out_at, work.b, work.h) + row0 * p.out_at.n, p.out_at.n,
               acc, int(p.Nq) - row0, int(p.Dv), halves);
}

// Where a consumer warpgroup is in the circular buffers.
struct ReadState {
    PipelineState<Q_STAGES> q;
    PipelineState<2> work;
    PipelineState<STAGES> k, v;
};

// A consumer warpgroup: the work tiles of the first pass, or of the NaN-safe ones.
template <bool NAN_SAFE>
__device__ inline void consume(const Params& p, const Smem& smem, int warpgroup, ReadState& read) {
    const RowGroup rows(16);
    const int row0 = rows.row0 % WARPGROUP_ROWS;  // of this warp among those of its warpgroup
    const bool leader = threadIdx.x % WARPGROUP == 0;
    PipelineState<Q_STAGES> q_pipe = read.q;
    PipelineState<2> work_pipe = read.work;
    PipelineState<STAGES> k_pipe = read.k, v_pipe = read.v;

    WorkTile work{}, next;
    int tile = 0;  // under a block mask, an index of its sparse list:
    const int* entries = nullptr;
    int entry = 0, next_entry = 0;
    Scores<false, 1, NT> s(0, 0);
    Atom<Element>::A probs[BLOCK_K / 16];  // P as an operand of PV
    Fragment<Accum, 1, VT> acc;
    RowState<1> state;
    Accum rescale[1][2];

    // By all threads: each has read the work tile for itself, and generic stores overwrite it. Only
    // GEMMs read q, and all of them are complete. In a NaN-safe pass each has marked what it leaves
    // to the third.
    auto release_q = [&] {
        smem.q_empty(q_pipe.stage).arrive();
        q_pipe.advance(CONSUMERS);
    };
    // By one thread: the GEMM that reads the stage is the warpgroup's as a whole, and it is
    // complete. What the NaN-safe path reads and writes of v is fenced there.
    auto release_k = [&] {
        if (leader) smem.k_empty(k_pipe.stage).arrive();
        k_pipe.advance();
    };
    auto release_v = [&] {
        if (leader) smem.v_empty(v_pipe.stage).arrive();
        v_pipe.advance();
    };
    auto issue_qk = [&] {
        gemm_async<Element, HEAD_DIM>(s, smem.q(q_pipe.stage), 0, smem.k(k_pipe.stage));
    };
    auto issue_pv = [&] {
        smem.v_full(v_pipe.stage).wait(v_pipe.phase);
        gemm_async<Element>(acc, probs, smem.v(v_pipe.stage));
    };
    auto finish_pv = [&] {
        warpgroup_wait<0>(acc);
        release_v();
    };
    auto convert_p = [&] {
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; ++i) probs[i] = Atom<Element>::a_of(s.x[0] + 2 * i);
    };

    // Tiles that only other warpgroups attend to.
    auto skip_tiles = [&](int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            smem.k_full(k_pipe.stage).wait(k_pipe.phase);
            smem.v_full(v_pipe.stage).wait(v_pipe.phase);
            // No GEMM has kept the warps together.
            named_barrier_sync<WARPGROUP>(barrier_id(NamedBarrier::WARPGROUP, warpgroup));
            release_k();
            release_v();
        }
    };
    // Whether the tile needs a mask. The next entry of a sparse list is loaded meanwhile.
    auto is_partial = [&] {
        if constexpr (!HAS_BLOCK_MASK) return work.tiles.is_partial(tile);
        entry = next_entry, next_entry = entries[tile + 1];
        return entry % 2 || work.tiles.is_partial(entry / 2);
    };
    auto fetch_work = [&] {
        smem.q_full(warpgroup, work_pipe.stage).wait(work_pipe.phase);
        work_pipe.advance();
        next = smem.storage.work_tiles[q_pipe.stage];
        if (next.tiles.begin >= next.tiles.end || next.is_end)
            next.tiles.begin = next.tiles.end = next.end;
    };
    auto start_work = [&] {
        work = next;
        tile = work.tiles.begin;
        if (!work.is_end) skip_tiles(tile - work.begin);
        // QK is issued even where there is no tile, on whatever the stage holds: under a condition,
        // ptxas would serialise all GEMMs.
        if (HAS_BLOCK_MASK) entries = BlockSparseList(p, work).entries, next_entry = entries[tile];
        if (tile < work.tiles.end) smem.k_full(k_pipe.stage).wait(k_pipe.phase);
        issue_qk();
    };
    auto modify_and_mask = [&](bool partial) {
        const ScoreMod score_mod(p, work.b, work.h);
        s.row = work.q0 + row0, s.column = (HAS_BLOCK_MASK ? entry / 2 : tile) * BLOCK_K;
        s.apply(score_mod, WarpBias<false, 1, NT>(nullptr), [](int, int, int, Accum) {});
        if (partial) s.masked_fill(AttentionMask(p, work.b, work.h), DenseMask<false, 1, NT>{});
    };
    auto online_softmax = [&] {
        const Accum softmax_scale_log2 = ScoreMod(p, work.b, work.h).softmax_scale_log2();
        constexpr RowMaxMode MODE = NAN_SAFE ? RowMaxMode::DETECT_LATE : RowMaxMode::BOUNDED;
        state.template update<RESCALE_THRESHOLD, MODE>(s, softmax_scale_log2, rows, rescale);
    };
    auto softmax = [&](bool partial) {
        release_k();
        modify_and_mask(partial);
        online_softmax();
    };
    // Softmax of tile j overlaps PV of tile j - 1:
    //
    //     step                       GEMMs in flight      stages held
    //     issue QK of j              QK                   k(j), v(j - 1)
    //     issue PV of j - 1          QK, PV               k(j), v(j - 1)
    //     wait QK, release k         PV                   v(j - 1)
    //     mask, softmax              PV                   v(j - 1)
    //     wait PV, release v         -                    -
    //     convert P, rescale O       -                    -
    auto step = [&](bool partial) {
        smem.k_full(k_pipe.stage).wait(k_pipe.phase);
        issue_qk();
        issue_pv();
        warpgroup_wait<1>(s);
        softmax(partial);
        if constexpr (INTRA_WARPGROUP_OVERLAP) order_wait_after(state.l[0][0] + state.l[0][1] < 0);
        finish_pv();
        convert_p();
        acc.scale_rows(rescale);
    };
    // Tile by tile, the warpgroups side by side: they clean the values of partial tiles together.
    // The table of what was not finite takes the k stage, once all have their scores.
    auto nan_safe_loop = [&] {
        constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;
        for (;;) {
            const bool partial = __any_sync(~0u, is_partial());
            modify_and_mask(partial);
            const NonFinite<Element, BLOCK_K, VALUE_DIM> table{smem.k(k_pipe.stage).address};
            Attended<1, NT> attended;
            bool any = false;
            smem.v_full(v_pipe.stage).wait(v_pipe.phase);
            if (partial) {
                attended.mark(s);
                named_barrier_sync<CONSUMER_THREADS>(CONSUMER_BARRIER);
                any = table.clean<CONSUMER_THREADS / WARP>(smem.v(v_pipe.stage), rows.warp_m);
                fence_async_shared();
                any = named_barrier_or<CONSUMER_THREADS>(CONSUMER_BARRIER, any);
            }
            online_softmax();
            s.scale(1 / P_DIVISOR);
            convert_p();
            acc.scale_rows(rescale);
            gemm_async<Element>(acc, probs, smem.v(v_pipe.stage));
            warpgroup_wait<0>(acc);
            if (__any_sync(~0u, any)) {
                add_non_finite(acc, table, 0,
                               [&](int m, int half, int w) { return attended.word(m, half, w); });
                // All reads and writes of both stages are done and fenced before they are refilled.
                fence_async_shared();
                named_barrier_sync<CONSUMER_THREADS>(CONSUMER_BARRIER);
            }
            release_k();
            release_v();
            if (++tile == work.tiles.end) return;
            smem.k_full(k_pipe.stage).wait(k_pipe.phase);
            issue_qk();
            warpgroup_wait<0>(s);
        }
    };

    // A work tile: its first QK is in flight when it begins, and that of the next one during its
    // epilogue.
    fetch_work();
    start_work();
    while (!work.is_end) {
        state = RowState<1>(NAN_SAFE && work.all_large);
        acc.clear();
        warpgroup_wait<0>(s);
        if (tile == work.tiles.end) {
            release_q();
            fetch_work();
        } else if constexpr (NAN_SAFE) {
            nan_safe_loop();
            // Before the arrive on q_empty, which publishes it to the producer.
            if (__any_sync(~0u, !work.all_large && state.below(-LARGE_ROW_MAX)))
                smem.mark_unfinished(1, work.iteration);
            release_q();
            fetch_work();
        } else {
            softmax(is_partial());
            convert_p();
            for (++tile; tile < work.tiles.end;) {
                if (is_partial()) {
                    step(true), ++tile;
                } else {
                    const int end = HAS_BLOCK_MASK ? tile + 1 : work.tiles.full_end;
#pragma unroll 1
                    for (; tile < end; ++tile) step(false);
                }
            }
            release_q();
            issue_pv();
            fetch_work();
            finish_pv();
        }
        const WorkTile done = work;
        skip_tiles(done.end - done.tiles.end);
        start_work();
        epilogue<NAN_SAFE>(p, smem, done, done.q0 + row0, state, acc);
    }
    warpgroup_wait<0>(s);
    release_q();
    read = {q_pipe, work_pipe, k_pipe, v_pipe};
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    forward_sm90(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage;
    const Smem smem{shared_address(tensors), storage};
    // Uniform in a warp, as the shuffle tells the compiler.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) smem.init();
    if (threadIdx.x == WARP)
        prefetch_tensormap(maps.k), prefetch_tensormap(maps.q), prefetch_tensormap(maps.v);
    __syncthreads();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x % WARPGROUP == 0) produce(p, maps, smem);
    } else {
        reg_alloc<CONSUMER_REGISTERS>();
        ReadState read{{warpgroup}};
        consume<false>(p, smem, warpgroup, read);
        // Unfinished work tiles have been marked.
        named_barrier_sync<WARPGROUP>(barrier_id(NamedBarrier::WARPGROUP, warpgroup));
        if (threadIdx.x % WARPGROUP == 0) smem.pass_done().arrive();
        smem.pass_done().wait(0);
        if (__any_sync(~0u, smem.any_unfinished(0))) consume<true>(p, smem, warpgroup, read);
    }
}
