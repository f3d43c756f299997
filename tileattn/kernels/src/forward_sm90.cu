// Attention, forward, on Hopper. One thread, the producer, copies tiles of keys and values into a
// ring by TMA; two or three warpgroups, the consumers, multiply, each for 64 queries. Blocks of
// threads stay, and take one block of queries after the other. Mirrors forward_rows in spec.py.
// Shah et al., FlashAttention-3, arXiv:2407.08608.
//
// A weight of zero does not hide a NaN: one in a value reaches queries that do not see it, in tiles
// of which only some pairs are visible. So works whose sums are not finite are done again in a second,
// safe sweep: values that are not finite are taken out of partial tiles, and injected where they are
// visible. So are works whose scores are too large for the exponents of the first sweep.
//
// The first sweep is broken off when several works are unfinished. When that is noticed is a matter of
// timing, and the bits of a row must not be. So the arithmetic of a row depends on its own scores alone:
// a row is large if its maximum over all keys is. A running maximum above ORDINARY never falls, so the
// second sweep lets such a row turn large at once. One below -ORDINARY may rise. The second sweep takes
// such a row for ordinary, as the first does. If it has not risen in the end, the work is done again in
// a third sweep, in which all rows are large, and which writes only rows that are far below zero.
#include "nonfinite.cuh"
#include "plain.cuh"
#include "softmax.cuh"
#include "work_sm90.cuh"

constexpr int NT = BLOCK_K / 8, VT = VALUE_DIM / 8;

// Registers of a thread: what is given back by the warps that copy goes to those that multiply.
constexpr int COPY_REGISTERS = GROUPS == 2 ? 24 : 32;
constexpr int MULTIPLY_REGISTERS = GROUPS == 2 ? 240 : 160;

// Maxima may fall behind by so many powers of two before sums are rescaled: probabilities of 16
// bits have room for them, and the result does not depend on it but for rounding.
constexpr int SLACK = 8;

// Sums of large numbers may overflow for that. A safe sweep divides its weights by a power of two, which
// makes them 1 at most. That leaves results the bits of the first sweep, unless a weight below 2**-118,
// whose quotient has fewer digits, is seen in them.
constexpr Sum LOWERED = HAS_FINITE_SUMS<Element> ? Sum(1) : Sum(1 << SLACK);

// Whether products with values go on during a warpgroup's own exponentials. Where values have 128
// columns, those of the other warpgroup fill the time as well or better (measured).
constexpr bool OVERLAPS = VALUE_DIM != 128;

struct Maps {
    TensorMap q, k, v;
};

// One thread copies all that the works need, in the order in which it is needed, and says what is
// to be done with it.
__device__ inline void copy(const Params& p, const Maps& maps, const Memory& memory) {
    Place<Q_STAGES> q;
    Place<2> told;
    Place<STAGES> k, v;
    Work work{};
    // Tell each warpgroup its part, with its queries.
    auto tell = [&] {
#pragma unroll 1
        for (int group = 0; group < GROUPS; ++group, q.next()) {
            memory.q_empty(q.stage).wait(q.round ^ 1);
            Work& said = memory.shared.works[q.stage];
            const Barrier full = memory.q_full(group, told.stage);
            said = work;
            if (work.end) {
                full.arrive();
                continue;
            }
            said.q0 += GROUP_ROWS * group;
            // In a safe sweep the warpgroups go through the same tiles side by side.
            if (!work.safe) said.tiles = tiles_of(p, work.b, said.q0, GROUP_ROWS);
            if (HAS_BLOCK_MASK) said.tiles.first = work.first, said.tiles.past = work.past;
            memory.q(q.stage).load(maps.q, said.q0, work.h, work.b, full);
        }
        told.next();
    };
    auto tile_at = [&](int place) {
        return HAS_BLOCK_MASK ? Listed(p, work).tiles[place] / 2 : place;
    };
    auto load_keys = [&](int place) {
        const int tile = tile_at(place);
        memory.k_empty(k.stage).wait(k.round ^ 1);
        memory.k(k.stage).load(maps.k, tile * BLOCK_K, work.h / int(p.group), work.b,
                               memory.k_full(k.stage));
        k.next();
    };
    auto load_values = [&](int place) {
        const int tile = tile_at(place);
        memory.v_empty(v.stage).wait(v.round ^ 1);
        memory.v(v.stage).load(maps.v, tile * BLOCK_K, work.h / int(p.group), work.b,
                               memory.v_full(v.stage));
        v.next();
    };
    // The next work is looked for while the first tiles of this one come. Where several works were
    // not finished, the others will hardly be: the second sweep begins with what is left.
    int begun = 0;  // turns of the first sweep
    auto sweep = [&](int number) {
        int turn = 0;
        auto find = [&](Work& work) {
#pragma unroll 1
            while (find_work(p, turn, work)) {
                if (number == 0 || (number == 1 && turn >= begun)) return true;
                if (memory.unfinished(number - 1, turn)) return true;
                ++turn;
            }
            return false;
        };
        for (bool found = find(work); found;) {
            if (number == 0 && memory.many_unfinished(0)) break;
            if (work.first < work.past) load_keys(work.first);
            work.safe = number > 0, work.large = number > 1;
            tell();
            Work next = work;
            ++turn;
            if (number == 0) begun = turn;
            found = find(next);
            if (found && Q_STAGES < 2 * GROUPS)
#pragma unroll 1
                for (int row = 0; row < BLOCK_Q; row += GROUP_ROWS)
                    QueryTile::prefetch(maps.q, next.q0 + row, next.h, next.b);
#pragma unroll 1
            for (int tile = work.first; tile < work.past; ++tile) {
                if (tile + 1 < work.past) load_keys(tile + 1);
                load_values(tile);
            }
            work = next;
        }
    };
    auto end = [&] {
        work.end = true;
        tell();
        work.end = false;
    };
    sweep(0);
    end();
    memory.swept().wait(0);
    if (!memory.any_unfinished(0)) return;
    // To the warpgroups the safe sweeps are one. They mark works before they release their queries: once
    // all queries are released, it is known what the third sweep has to do.
#pragma unroll 1
    for (int number = 1; number < 3 && memory.any_unfinished(number - 1); ++number) {
        sweep(number);
        Place<Q_STAGES> each = q;
#pragma unroll 1
        for (int stage = 0; stage < Q_STAGES; ++stage, each.next())
            memory.q_empty(each.stage).wait(each.round ^ 1);
    }
    end();
}

__device__ inline Sum* lse_of(const Params& p, const Work& work) {
    return static_cast<Sum*>(p.lse) + (i64(work.b) * p.Hq + work.h) * p.Nq;
}

// Divide the sums of 16 rows of each warp from row0 on, and write them. The third sweep writes only rows
// far below zero. Others keep their bits, also in works that are done for sharing a bit with a marked one.
// Its maxima differ by up to the slack from those of the second: with twice that as a margin, each row
// that is written would have had its work marked.
template <bool SAFE>
__device__ inline void finish(const Params& p, const Memory& memory, const Work& work, int row0,
                              RowState<1>& state, Fragment<Sum, 1, VT>& acc) {
    u32 halves = 3;
    if constexpr (SAFE) {
        if (work.large) halves = state.below(-ORDINARY - 2 * SLACK, Terms(p, work.b, work.h).unit());
    } else {
        // Zero times what is not finite is not zero; sums in parts are not one long chain. A value
        // that is not finite spoils its column in all rows: half of them are enough. But a sum that
        // overflows is one row's.
        constexpr int LOOKED_AT = HAS_FINITE_SUMS<Element> ? 2 : 4;
        Sum spoiled[2] = {};
#pragma unroll
        for (int n = 0; n < VT; ++n)
#pragma unroll
            for (int e = 0; e < LOOKED_AT; ++e)
                spoiled[e % 2] = fma(acc.x[0][n][e], Sum(0), spoiled[e % 2]);
        const bool good = spoiled[0] + spoiled[1] == 0 && state.all_ordinary();
        if (!__all_sync(~0u, good)) memory.leave_unfinished(0, work.turn);
    }
    const Sum sink = sink_of(p, work.h);
    state.gather(RowGroup(16));
    Sum lse[2], weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        weight[half] = state.template finish<true>(0, half, sink, SAFE ? LOWERED : Sum(1),
                                                   Sum(p.natural), lse[half]);
#pragma unroll
        for (int n = 0; n < VT; ++n)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) acc.x[0][n][e] *= weight[half];
    }
    const Lane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = row0 + lane.row(2 * half);
        if (lane.t == 0 && i < p.Nq && (!SAFE || halves >> half & 1)) lse_of(p, work)[i] = lse[half];
    }
    store_rows(rows_of<Element>(p.out, p.out_at, work.b, work.h) + row0 * p.out_at.n, p.out_at.n,
               acc, int(p.Nq) - row0, int(p.Dv), halves);
}

// Where a warpgroup is in the rings.
struct Places {
    Place<Q_STAGES> q;
    Place<2> heard;
    Place<STAGES> k, v;
};

// What one warpgroup does with the works of the first sweep, or of the safe ones.
template <bool SAFE>
__device__ inline void multiply(const Params& p, const Memory& memory, int group, Places& at) {
    const RowGroup rows(16);
    const int row0 = rows.row0 % GROUP_ROWS;  // of this warp among those of its warpgroup
    const bool leader = threadIdx.x % GROUP == 0;
    Place<Q_STAGES> q_at = at.q;
    Place<2> heard = at.heard;
    Place<STAGES> k_at = at.k, v_at = at.v;

    Work work{}, next;
    int tile = 0;  // or under a block mask its place in a list, which is
    const int* list = nullptr;
    int listed = 0, ahead = 0;  // and what stands there, and behind
    Scores<false, 1, NT> s(0, 0);
    Atom<Element>::A weights[BLOCK_K / 16];
    Fragment<Sum, 1, VT> acc;
    RowState<1> state;
    Sum rescale[1][2];

    // By all threads: each has read for itself what was told with the queries, and that is written
    // by generic stores again. The queries are read by GEMMs alone, all of which are complete. In a safe
    // sweep each has marked what it leaves to the third.
    auto release_queries = [&] {
        memory.q_empty(q_at.stage).arrive();
        q_at.next(GROUPS);
    };
    // Safe for one thread of the warpgroup: it calls once the GEMM that reads the stage, which is the
    // warpgroup's as a whole, is complete; what `clean` reads and writes of values is fenced there.
    auto release_keys = [&] {
        if (leader) memory.k_empty(k_at.stage).arrive();
        k_at.next();
    };
    auto release_values = [&] {
        if (leader) memory.v_empty(v_at.stage).arrive();
        v_at.next();
    };
    auto begin_scores = [&] {
        begin_product<Element, HEAD_DIM>(s, memory.q(q_at.stage), 0, memory.k(k_at.stage));
    };
    auto begin_values = [&] {
        memory.v_full(v_at.stage).wait(v_at.round);
        begin_product<Element>(acc, weights, memory.v(v_at.stage));
    };
    auto end_values = [&] {
        end_product<0>(acc);
        release_values();
    };
    auto keep_weights = [&] {
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; ++i) weights[i] = Atom<Element>::a_of(s.x[0] + 2 * i);
    };

    // Tiles that only other warpgroups see.
    auto skip = [&](int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            memory.k_full(k_at.stage).wait(k_at.round);
            memory.v_full(v_at.stage).wait(v_at.round);
            sync_named<GROUP>(1 + group);  // no product has kept the warps together
            release_keys();
            release_values();
        }
    };
    // Whether some query does not see all of the tile. What comes behind it is looked up meanwhile.
    auto at_boundary = [&] {
        if constexpr (!HAS_BLOCK_MASK) return work.tiles.boundary(tile);
        listed = ahead, ahead = list[tile + 1];
        return listed % 2 || work.tiles.boundary(listed / 2);
    };
    // Find out what comes next,
    auto hear = [&] {
        memory.q_full(group, heard.stage).wait(heard.round);
        heard.next();
        next = memory.shared.works[q_at.stage];
        if (next.tiles.first >= next.tiles.past || next.end)
            next.tiles.first = next.tiles.past = next.past;
    };
    // and begin its first scores.
    auto start = [&] {
        work = next;
        tile = work.tiles.first;
        if (!work.end) skip(tile - work.first);
        // Where there is no tile, of what happens to be there: were it not for all, the compiler
        // would have every product wait for the one before.
        if (HAS_BLOCK_MASK) list = Listed(p, work).tiles, ahead = list[tile];
        if (tile < work.tiles.past) memory.k_full(k_at.stage).wait(k_at.round);
        begin_scores();
    };
    auto find_scores = [&](bool boundary) {
        const Terms terms(p, work.b, work.h);
        s.row = work.q0 + row0, s.column = (HAS_BLOCK_MASK ? listed / 2 : tile) * BLOCK_K;
        s.apply(terms, WarpBias<false, 1, NT>(nullptr), [](int, int, int, Sum) {});
        if (boundary) s.hide(Sight(p, work.b, work.h), DenseMask<false, 1, NT>{});
    };
    auto find_weights = [&] {
        const Sum unit = Terms(p, work.b, work.h).unit();
        constexpr RowKind ROWS = SAFE ? RowKind::RISING : RowKind::ORDINARY;
        state.template absorb<SLACK, ROWS>(s, unit, rows, rescale);
    };
    auto absorb = [&](bool boundary) {
        release_keys();
        find_scores(boundary);
        find_weights();
    };
    // The next scores and these values are under way together; then the scores are absorbed.
    auto visit = [&](bool boundary) {
        memory.k_full(k_at.stage).wait(k_at.round);
        begin_scores();
        begin_values();
        end_product<1>(s);
        absorb(boundary);
        if constexpr (OVERLAPS) hold_back(state.l[0][0] + state.l[0][1] < 0);
        end_values();
        keep_weights();
        acc.scale_rows(rescale);
    };
    // One tile after the other, the warpgroups side by side: they look at the values of partial tiles
    // together. The keys' stage has the table of what is not finite, once all have their scores.
    auto visit_all_safely = [&] {
        constexpr int MULTIPLYING = GROUPS * GROUP, BARRIER = 1 + GROUPS;
        for (;;) {
            const bool boundary = __any_sync(~0u, at_boundary());
            find_scores(boundary);
            const NonFinite<Element, BLOCK_K, VALUE_DIM> table{memory.k(k_at.stage).address};
            Attended<1, NT> attended;
            bool any = false;
            memory.v_full(v_at.stage).wait(v_at.round);
            if (boundary) {
                attended.look(s);
                sync_named<MULTIPLYING>(BARRIER);
                any = table.clean<MULTIPLYING / WARP>(memory.v(v_at.stage), rows.warp_m);
                fence_shared();
                any = any_of<MULTIPLYING>(BARRIER, any);
            }
            find_weights();
            s.scale(1 / LOWERED);
            keep_weights();
            acc.scale_rows(rescale);
            begin_product<Element>(acc, weights, memory.v(v_at.stage));
            end_product<0>(acc);
            if (__any_sync(~0u, any)) {
                inject(acc, table, 0,
                       [&](int m, int half, int w) { return attended.word(m, half, w); });
                // What was read and written of both stages is done, and fenced, before they are
                // filled again.
                fence_shared();
                sync_named<MULTIPLYING>(BARRIER);
            }
            release_keys();
            release_values();
            if (++tile == work.tiles.past) return;
            memory.k_full(k_at.stage).wait(k_at.round);
            begin_scores();
            end_product<0>(s);
        }
    };

    hear();
    start();
    while (!work.end) {
        state = RowState<1>(SAFE && work.large);
        acc.clear();
        end_product<0>(s);
        if (tile == work.tiles.past) {
            release_queries();
            hear();
        } else if constexpr (SAFE) {
            visit_all_safely();
            // Before the arrival on q_empty, which tells the producer of it.
            if (__any_sync(~0u, !work.large && state.below(-ORDINARY)))
                memory.leave_unfinished(1, work.turn);
            release_queries();
            hear();
        } else {
            absorb(at_boundary());
            keep_weights();
            for (++tile; tile < work.tiles.past;) {
                if (at_boundary()) {
                    visit(true), ++tile;
                } else {
                    const int past = HAS_BLOCK_MASK ? tile + 1 : work.tiles.full_past;
#pragma unroll 1
                    for (; tile < past; ++tile) visit(false);
                }
            }
            release_queries();
            begin_values();
            hear();
            end_values();
        }
        const Work done = work;
        skip(done.past - done.tiles.past);
        start();
        finish<SAFE>(p, memory, done, done.q0 + row0, state, acc);
    }
    end_product<0>(s);
    release_queries();
    at = {q_at, heard, k_at, v_at};
}

extern "C" __global__ void __launch_bounds__((GROUPS + 1) * GROUP, 1)
    forward_sm90(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char tiles[];
    __shared__ Shared shared;
    const Memory memory{shared_address(tiles), shared};
    // The same in all lanes of a warp, as the compiler is to know.
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0) memory.start();
    if (threadIdx.x == WARP) prefetch_map(maps.k), prefetch_map(maps.q), prefetch_map(maps.v);
    __syncthreads();
    if (group == GROUPS) {
        keep_registers<COPY_REGISTERS>();
        if (threadIdx.x % GROUP == 0) copy(p, maps, memory);
    } else {
        take_registers<MULTIPLY_REGISTERS>();
        Places at{{group}};
        multiply<false>(p, memory, group, at);
        sync_named<GROUP>(1 + group);  // what is not finished has been noted
        if (threadIdx.x % GROUP == 0) memory.swept().arrive();
        memory.swept().wait(0);
        if (__any_sync(~0u, memory.any_unfinished(0))) multiply<true>(p, memory, group, at);
    }
}
