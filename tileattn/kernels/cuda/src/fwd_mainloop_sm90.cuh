// Layer 3. Hopper's forward kernel without its GEMMs: the producer, which goes through the work
// tiles pass by pass, and the epilogue.
#pragma once

#include "gather_sm90.cuh"
#include "nonfinite.cuh"
#include "running_total.cuh"
#include "splits.cuh"

constexpr int NT = BLOCK_K / 8, VT = VALUE_DIM / 8;

// A NaN-safe pass divides P by this power of two, so that P is at most 1: a shift may be below the maximum
// by RESCALE_THRESHOLD, and sums of large values could overflow. The first pass gives the same bits,
// unless a probability below 2**-118 shows in them, whose quotient is subnormal.
constexpr Accum P_DIVISOR = HAS_FINITE_SUMS<Element> ? Accum(1) : Accum(1 << RESCALE_THRESHOLD);

// The TMA loads of the key tiles of a work tile.
template <bool>
struct KeyLoads {
    const WorkSequence<PACKED>& sequence;

    __device__ KeyLoads(const Params&, const Smem&, const WorkSequence<PACKED>& sequence, int)
        : sequence(sequence) {}
    __device__ void look_up() {}
    // Start the loads of a tile of keys or values of a key head, from key k0 on.
    template <class Tile>
    __device__ void load(const Tile& tile, const TensorMap& map, int k0, int kv,
                         const Barrier& full) const {
        tile.template load<LOAD_UNROLL, READS_ONCE>(map, sequence.k_start + k0, kv, sequence.entry(), full);
    }
};
// With paged keys each TMA box lies in one page: its rows divide both a page and a tile. Tiles are looked up
// in order, one ahead of the loads of keys. Block-table entries are copied to shared memory asynchronously: if
// the producer waited for each lookup, it would take longer than the consumers.
template <>
struct KeyLoads<true> {
    const Params& p;
    const Smem& smem;
    PageTable table;
    int box;      // rows
    int k0, row;  // the first key of the next tile to look up, and its row in its page
    u32 entry;    // of that page

    __device__ KeyLoads(const Params& p, const Smem& smem, const WorkSequence<PACKED>& sequence, int k0)
        : p(p),
          smem(smem),
          table(p, sequence.b),
          box((int(p.page) | BLOCK_K) & -(int(p.page) | BLOCK_K)),
          k0(k0),
          row(u32(k0) % u32(p.page)),
          entry(u32(k0) / u32(p.page)) {
        look_up();
    }
    // Wait for the entries of the previous tile, and start to copy the entries of the next tile.
    __device__ void look_up() {
        copy_wait<0>();
        BoxPlace* place = smem.places(k0);
#pragma unroll 2
        for (int at = 0; at < BLOCK_K; at += box, ++place) {
            copy_async<4>(shared_address(&place->entry),
                          reinterpret_cast<const char*>(table.entry(p, entry)));
            store_shared(shared_address(&place->row), row);
            row += box;
            if (row == int(p.page)) row = 0, ++entry;
        }
        copy_commit();
        k0 += BLOCK_K;
    }
    // Each place is read before the loads of the previous box start, which hides the latency.
    template <class Tile>
    __device__ void load(const Tile& tile, const TensorMap& map, int k0, int kv,
                         const Barrier& full) const {
        full.arrive_and_expect_tx(Tile::BYTES);
        const BoxPlace* const places = smem.places(k0);
        BoxPlace next = places[0];
#pragma unroll 2
        for (int at = 0, n = 0; at < BLOCK_K; at += box) {
            const BoxPlace place = next;
            next = places[++n];
            tile.template load_box<Tile::SLICES, READS_ONCE>(map, at, place.row, kv,
                                                             int(PageTable::page(p, place.entry)), full);
        }
    }
};

// If keys are gathered, only q has a tensor map. If the warpgroups load q, only keys and values have.
struct QueryMap {
    TensorMap q;
};
struct KeyMaps {
    TensorMap k, v;
};
template <bool>
struct LoadedMaps {
    using Type = ForwardMaps;
};
template <>
struct LoadedMaps<true> {
    using Type = QueryMap;
};
__device__ inline void set_up(const Smem& smem, const ForwardMaps& maps) {
    set_up(smem, maps.k, maps.q, maps.v);
}
__device__ inline void set_up(const Smem& smem, const QueryMap& maps) { set_up(smem, maps.q); }
__device__ inline void set_up(const Smem& smem, const KeyMaps& maps) { set_up(smem, maps.k, maps.v); }

// Prefetch q of the next work tile while this one is being computed, instead of after its last K/V load?
// There must be stages for it. With two groups there is nothing to hide: the other group computes.
constexpr bool PREFETCHES_Q = GROUPS == 1 && Q_STAGES == 2 * CONSUMERS;
// The load of q waits for a free stage, so for the end of the previous work tile, and blocks the producer
// until then. With at most STAGES key tiles the K loads after it would stall. With more than 4, prefetching
// was slower when measured. Dynamically scheduled work tiles always prefetch: they are
// claimed only when the last K/V loads have been issued.
__device__ constexpr bool is_short(int tiles) { return tiles > STAGES && tiles <= 4; }

// The scheduler thread: find the work tiles of the first pass for the producer, one ahead.
__device__ inline void schedule(const Params& p, const Smem& smem, WorkOrder<> order) {
    WorkTile& work = smem.found();
    for (u32 phase = 1;; phase ^= 1) {
        // The producer has read the work tile, with plain loads, as these stores are: there is no proxy to
        // fence.
        smem.found_empty().wait(phase);
        if (smem.storage.stops) return;
        const bool is_end = !get_work(p, order, work);
        work.is_end = is_end, work.iteration = order.iteration;
        smem.found_full().arrive();
        if (is_end) return;
    }
}

// The producer thread: publish work tiles, and load what they need in the order of use. If keys are gathered, it
// loads only q.
template <class Order, class Maps>
__device__ inline void produce(const Params& p, const Maps& maps, const Smem& smem, Order order) {
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<2> work_pipe;
    PipelineState<STAGES> k_pipe, v_pipe;
    WorkTile own_work{};
    WorkTile& work = HAS_SCHEDULER ? smem.found() : own_work;
    // Publish the work tile to each warpgroup, with the warpgroup's queries.
    auto publish_work = [&] {
#pragma unroll 1
        for (int warpgroup = 0; warpgroup < CONSUMERS; ++warpgroup, q_pipe.advance()) {
            smem.q_empty(q_pipe.stage).wait(q_pipe.phase ^ 1);
            WorkTile& own = smem.storage.work_tiles[q_pipe.stage];
            const Barrier full = smem.q_full(warpgroup, work_pipe.stage);
            own = work;
            if (work.is_end) {
                full.arrive();
                continue;
            }
            // Rotate the warpgroups: with a causal mask the last rows have most tiles.
            own.q0 += ROWS * ((warpgroup + (SPLIT_KV ? 0 : work.iteration)) % CONSUMERS);
            // In a NaN-safe pass the warpgroups go through the same tiles in lockstep.
            if (!work.nan_safe) own.tiles = key_tiles(p, work, work.window, own.q0, ROWS);
            if (HAS_TILE_LIST) own.tiles.begin = work.begin, own.tiles.end = work.end;
            if constexpr (LOADS_OWN_Q)
                full.arrive();  // the warpgroup loads its rows itself
            else
                smem.q(q_pipe.stage).load<LOAD_UNROLL>(maps.q, work.q_start + own.q0, work.h,
                                                       work.entry(), full);
        }
        work_pipe.advance();
    };
    int begun = 0;  // iterations that the first pass has begun
    u32 found_phase = 0;
    // Find the next work tile of the first pass. Later passes know how many the scheduler thread has claimed.
    auto find_first = [&] {
        if constexpr (!HAS_SCHEDULER) return get_work(p, order, work);
        smem.found_full().wait(found_phase);
        found_phase ^= 1;
        if constexpr (HAS_SCHEDULER) order.claimed = work.iteration;
        return !work.is_end;
    };
    Lockstep lockstep;
    auto run_pass = [&](int pass) {
        order.restart();
        work.nan_safe = pass > 0, work.all_max_first = pass > 1;
        auto find = [&] {
#pragma unroll 1
            while (HAS_SCHEDULER && pass == 0 ? find_first() : get_work(p, order, work)) {
                const bool is_new = pass == 0 || (pass == 1 && work.iteration >= begun);
                if (is_new || smem.needs_redo(pass - 1, work.iteration)) return true;
            }
            return false;
        };
        // If several work tiles are unfinished, others probably will be: the second pass takes over.
        auto gives_up = [&] { return pass == 0 && smem.many_unfinished(0); };
        bool published = false;  // true if the work tile found last is published
        for (bool found = find(); found;) {
            if (!published && gives_up()) break;
            if (pass == 0) begun = work.iteration + 1;
            // Keep what the loads need: find() overwrites the work tile. Divide here, not before a load.
            const WorkSequence<PACKED> sequence = work;
            const KeyTileList list(p, work);
            const int begin = work.begin, end = max(begin, work.end), kv = work.h / int(p.group);
            // Find the next work tile once the first tiles of this one are loading. The dynamic scheduler
            // claims as late as the loads allow: then blocks of a head that are claimed one after the
            // other also begin together, and share keys in the L2 cache. Packed sequences are found
            // early, if the producer looks them up, since that takes long.
            const bool late = HAS_SCHEDULER || (!PACKED && p.next_tiles);
            const int find_at = late ? max(begin - 1, end - 2) : min(begin, end - 1);
            if constexpr (GATHERED) {
                // The gather warps do not wait for q, so it need not be prefetched.
                smem.send({sequence.b, kv, begin, end, find_at});
                publish_work();
                if (HAS_SCHEDULER && pass == 0) smem.found_empty().arrive();
                // All gather warps have copied the request, with plain loads, as the stores of send() are. There is
                // a request for each published work tile, but none for the end of the first pass.
                smem.mailbox_empty().wait(work_pipe.stage ^ (pass == 0));
                found = find();
            } else {
                // Keys are a tile ahead of values. Each load appears once in the code: a work tile executes
                // about as many instructions as the instruction caches of an SM hold.
                KeyLoads<PAGED && !GATHERED> loads(p, smem, sequence, begin * BLOCK_K);
#pragma unroll 1
                for (int tile = begin - 1; tile < end; ++tile) {
                    loads.look_up();
                    auto load_keys = [&] {
                        if (tile + 1 == end) return;
                        const Barrier full = smem.k_full(k_pipe.stage);
                        smem.k_empty(k_pipe.stage).wait(k_pipe.phase ^ 1);
                        loads.load(smem.k(k_pipe.stage), maps.k, list.tile(tile + 1) * BLOCK_K, kv, full);
                        k_pipe.advance();
                    };
                    if constexpr (STAGES > 1) load_keys();
                    if (tile >= begin) {
                        const Barrier full = smem.v_full(v_pipe.stage);
                        smem.v_empty(v_pipe.stage).wait(v_pipe.phase ^ 1);
                        loads.load(smem.v(v_pipe.stage), maps.v, list.tile(tile) * BLOCK_K, kv, full);
                        v_pipe.advance();
                        lockstep.advance(p);
                    } else {
                        if (!published) publish_work();
                        if (HAS_SCHEDULER && pass == 0) smem.found_empty().arrive();
                    }
                    // With one stage, values are free before the next keys.
                    if constexpr (STAGES == 1) load_keys();
                    if (tile != find_at) continue;
                    found = find();
                    const bool early = PREFETCHES_Q && (late || is_short(end - begin));
                    published = early && found && !gives_up();
                    if (published) publish_work();
                }
            }
        }
    };
    auto publish_end = [&] {
        work.is_end = true;
        publish_work();
        work.is_end = false;
    };
    run_pass(0);
    if (HAS_SCHEDULER && !work.is_end) {
        smem.storage.stops = true;
        smem.found_empty().arrive();
    }
    lockstep.end(p);
    publish_end();
    smem.pass_done().wait(0);
    if (!smem.any_redo(0)) return;
    // For the consumers the NaN-safe passes are one. They mark work tiles before they release q: once all
    // q stages are released, the third pass knows its work tiles.
#pragma unroll 1
    for (int pass = 1; pass < 3 && smem.any_redo(pass - 1); ++pass) {
        run_pass(pass);
        PipelineState<Q_STAGES> each = q_pipe;
#pragma unroll 1
        for (int stage = 0; stage < Q_STAGES; ++stage, each.advance())
            smem.q_empty(each.stage).wait(each.phase ^ 1);
    }
    publish_end();
}

// Load the rows of a warpgroup that share keys, by its own threads: they come from several heads.
__device__ inline void load_shared_rows(const Params& p, const WorkTile& work,
                                        const QueryTile& tile) {
    constexpr int CHUNKS = HEAD_DIM * int(sizeof(Element)) / 16;
    const int kv = work.h / int(p.group), rows = int(p.group) * work.Nq(p);
#pragma unroll 4
    for (int n = threadIdx.x % WARPGROUP; n < ROWS * CHUNKS; n += WARPGROUP) {
        const int r = n / CHUNKS, byte = n % CHUNKS * 16;
        const SharedRow row(p, kv, min(work.q0 + r, rows - 1));
        const Element* const from = q_row(p, work.sequence(p), row);
        const int valid = min(max(int(p.D * sizeof(Element)) - byte, 0), 16);
        copy_async<16>(tile.chunk(r, byte), reinterpret_cast<const char*>(from) + byte, valid);
    }
    copy_commit();
    copy_wait<0>();
    fence_async_shared();
}

// A warpgroup zeroes the rows of a tile of values from row `begin` on.
__device__ inline void zero_rows(const ValueTile& tile, int begin) {
    constexpr int CHUNKS = kv_columns(VALUE_DIM) / 8;
    const u32 zeros[4] = {};
#pragma unroll 1
    for (int i = begin * CHUNKS + threadIdx.x % WARPGROUP; i < BLOCK_K * CHUNKS; i += WARPGROUP)
        store_shared(tile.chunk(i / CHUNKS, i % CHUNKS * 16), zeros);
}

// Store 16 rows of each warp over a split, from row0 on: the output if it is the only split, else partial
// sums that are not normalised. `halves` has a bit for each of a lane's two rows that is to be stored.
template <class T = Element>  // a template, so that only kernels that call it compile it
__device__ inline void store_split(const Params& p, const WorkTile& work, int row0, u32 halves,
                                   const RowState<1>& state, Fragment<Accum, 1, VT>& acc) {
    const Lane lane;
    const int rows = int(p.group * p.Nq), kv = work.h / int(p.group);
    const Sequence sequence = work.sequence(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = min(row0 + lane.row(2 * half), rows - 1);
        const bool wanted = row0 + lane.row(2 * half) < rows && halves >> half & 1;
        RowSum sum;
        sum.m = state.m[0][half], sum.l = state.l[0][half];
        sum.max_first = state.needs_max_first(0, half);
        if (p.splits == 1) {
            if constexpr (INVARIANT) {  // as if added to a total of 0: -0 becomes 0
#pragma unroll
                for (auto& atom : acc.x[0]) atom[2 * half] += 0, atom[2 * half + 1] += 0;
            }
            const SharedRow shared(p, kv, row);
            const Accum inverse =
                sum.finish(p, lse_index(p, sequence, shared), shared.h, wanted && lane.t == 0);
#pragma unroll
            for (auto& atom : acc.x[0]) atom[2 * half] *= inverse, atom[2 * half + 1] *= inverse;
            store_row<T>(out_row(p, sequence, shared), acc, half, int(p.Dv), wanted);
        } else if (wanted) {
            const i64 index = partial_index(p, sequence, kv, row, work.split);
            if (lane.t == 0) sum.store(static_cast<Accum*>(p.partial_sums) + 2 * index);
            Accum* const to = static_cast<Accum*>(p.partial_out) + index * VALUE_DIM + lane.column(0);
#pragma unroll
            for (int n = 0; n < VT; ++n)
                *reinterpret_cast<float2*>(to + 8 * n) = {acc.x[0][n][2 * half],
                                                          acc.x[0][n][2 * half + 1]};
        }
    }
}

__device__ inline Accum* lse_of(const Params& p, const WorkTile& work) {
    return static_cast<Accum*>(p.lse) + (i64(work.entry()) * p.Hq + work.h) * p.Nq + work.q_start;
}

// Normalise and store 16 rows of each warp from row0 on, and their lse. `halves` has a bit for each of a
// lane's two rows that is to be stored. Two lanes share two rows, and each divides for one of them.
template <bool NAN_SAFE>
__device__ inline void store_normalised(const Params& p, const Smem& smem, const WorkTile& work,
                                        int row0, u32 halves, const RowState<1>& state,
                                        Fragment<Accum, 1, VT>& acc) {
    const Lane lane;
    const bool second = lane.t & 1;
    RowState<1> own = state.template own_row<!TOTALS>(second);
    const Accum dropout_scale = HAS_DROPOUT ? Accum(p.dropout_scale) : Accum(1);
    Accum lse;
    const Accum weight = own.template finalize<true>(
        0, 0, sink_of(p, work.h), dropout_scale * (NAN_SAFE && !TOTALS ? P_DIVISOR : Accum(1)),
        Accum(p.softmax_scale), lse);
    const Accum other = __shfl_xor_sync(~0u, weight, 1);
    acc.scale_rows(0, {second ? other : weight, second ? weight : other});
    const int i = row0 + lane.row(2 * second), rows = work.Nq(p) - row0;
    Accum* const lse_to = lse_of(p, work) + i;
    if (lane.t < 2 && i < work.Nq(p) && (!NAN_SAFE || halves >> second & 1)) *lse_to = lse;
    Element* const to = rows_of<Element>(p.out, p.out_at, work.entry(), work.h) +
                        (work.q_start + row0) * p.out_at.n;
    if constexpr (STAGED_OUT && !NAN_SAFE)
        store_rows_staged(smem.staging(warp_of_group()), to, p.out_at.n, acc, rows, int(p.Dv));
    else
        store_rows(to, p.out_at.n, acc, rows, int(p.Dv), halves);
}

// The shifts of a row in two passes differ by less than this, in units of log 2: a shift is below the
// maximum by at most RESCALE_THRESHOLD, and above it by less than log2 of the number of a lane's keys.
constexpr int SHIFT_MARGIN = 16;
static_assert((1 << (SHIFT_MARGIN - RESCALE_THRESHOLD)) > BLOCK_K / 4);

// Store the results of a work tile, and mark the work tile if a later pass must redo it. The third pass
// stores only rows far below zero; other rows keep their bits. This also holds for work tiles that it
// redoes because they share a bit with a marked one: with the margin, each row that it stores would have
// had its work tile marked.
template <bool NAN_SAFE>
__device__ inline void epilogue(const Params& p, const Smem& smem, const WorkTile& work, int row0,
                                RowState<1>& state, Fragment<Accum, 1, VT>& acc) {
    u32 halves = 3;
    bool good = true;
    const Accum softmax_scale_log2 = ScoreMod(p, work.b, work.h).softmax_scale_log2();
    if constexpr (!NAN_SAFE) {
        // A value that is not finite spoils its column in all rows, so half of the rows are enough. A sum
        // that overflows spoils only its own row.
        good = acc.template all_finite<HAS_FINITE_SUMS<Element> ? 2 : 4, 2>() & state.all_bounded();
    }
    if constexpr (SPLIT_KV || TOTALS) {
        state.reduce_sums(RowGroup(16));
        if constexpr (NAN_SAFE) acc.scale(P_DIVISOR);
    }
    // Check before the sums change: ptxas would keep copies of them for the check.
    if constexpr (TOTALS) order_after(!good && work.iteration < 0);
    if constexpr (TOTALS) RunningTotal{p, smem}.add_to(work, softmax_scale_log2, state, acc);
    if (NAN_SAFE && work.all_max_first) halves = state.below(-LARGE_ROW_MAX - SHIFT_MARGIN, softmax_scale_log2);
    if constexpr (SPLIT_KV)
        store_split(p, work, row0, halves, state, acc);
    else if (!work.continues)
        store_normalised<NAN_SAFE>(p, smem, work, row0, halves, state, acc);
    // This comes last, so that no store waits for the check.
    if (!NAN_SAFE && !__all_sync(~0u, good)) smem.mark_redo(0, work.iteration);
}
