// Layer 3. What the backward kernels of Hopper share: the thread that copies, the walk over the tiles
// of a work, and the steps from scores to gradients at them.
#pragma once

#include "mask.cuh"
#include "nonfinite.cuh"
#include "plain.cuh"
#include "walk_sm90.cuh"

constexpr int QT = BLOCK_Q / 8, DT = HEAD_DIM / 8, VT = VALUE_DIM / 8;

// Registers of a thread: what is given back by the warps that copy and add goes to those that
// multiply.
constexpr int COPY_REGISTERS = IS_WIDE ? 40 : 24, MULTIPLY_REGISTERS = IS_WIDE ? 232 : 240;

// Scores of 64 keys and a tile of queries, the slopes of the softcap at them, and what is made of
// them as operands of products.
using TileScores = Scores<true, 1, QT>;
using Slopes = Fragment<Sum, 1, HAS_SOFTCAP ? QT : 1>;
using Operands = Atom<Element>::A[BLOCK_Q / 16];

struct Maps {
    TensorMap q, k, v, dout;
};

__device__ inline const float* row_numbers(const Params& p, const void* numbers, int b, int h) {
    return static_cast<const float*>(numbers) + (i64(b) * p.Hq + h) * p.rows;
}

// One thread copies all that the works need, in the order in which it is needed.
__device__ inline void copy(const Params& p, const Maps& maps, const Memory& memory) {
    const int group = int(p.group);
    Place<1> kept;
    Place<1> v;
    Place<Q_STAGES> q;
    Place<OUT_STAGES> out;
    Work work{};
    auto load_queries = [&](int h, int q0) {
        const Barrier full = memory.q_full(q.stage);
        memory.q_empty(q.stage).wait(q.round ^ 1);
        BOTH_COPIES(memory.q(q.stage).load(maps.q, q0, h, work.b, full),
                    load_piece(shared_address(memory.shared.shifts[q.stage]),
                               row_numbers(p, p.shift, work.b, h) + q0, ROW_BYTES, full));
        q.next();
    };
    auto load_out = [&](int h, int q0) {
        const Barrier full = memory.out_full(out.stage);
        memory.out_empty(out.stage).wait(out.round ^ 1);
        BOTH_COPIES(memory.dout(out.stage).load(maps.dout, q0, h, work.b, full),
                    load_piece(shared_address(memory.shared.deltas[out.stage]),
                               row_numbers(p, p.delta, work.b, h) + q0, ROW_BYTES, full));
        out.next();
    };
    // All wait for the keys, with which they are told the work.
    auto tell = [&] {
        memory.k_empty().wait(kept.round ^ 1);
        memory.shared.work = work;
        kept.next();
    };
#pragma unroll 1
    while (find_work(p, claim(p), work)) {
        // All works of a head are skipped or none: while this kernel runs, these marks stay.
        if ((special(p, work.b, work.kv) & KNOWN) != REPAIRS) continue;
        const Tiles tiles = work.tiles;
        if (tiles.first >= tiles.past) {
            tell();
            memory.k_full().arrive();
            continue;
        }
        // There is no room for them before the last work is done.
        KeyTile::prefetch(maps.k, work.k0, work.kv, work.b);
        ValueTile::prefetch(maps.v, work.k0, work.kv, work.b);
        bool first = true;
#pragma unroll 1
        for (int tile = tiles.past; --tile >= tiles.first;)
#pragma unroll 1
            for (int g = 0; g < group; ++g) {
                const int h = work.kv * group + g, q0 = tile * BLOCK_Q;
                load_queries(h, q0);
                load_out(h, q0);
                if (!first) continue;
                first = false;
                // Room for values comes before room for keys.
                memory.v_empty().wait(v.round ^ 1);
                memory.v().load(maps.v, work.k0, work.kv, work.b, memory.v_full());
                v.next();
                tell();
                memory.k().load(maps.k, work.k0, work.kv, work.b, memory.k_full());
            }
    }
    work.end = true;
    tell();
    memory.k_full().arrive();
}

// What one of the threads adds of a tile of dq: some columns of 64 rows, in pieces.
struct Share {
    int adder, row, column, columns;
};

// One thread adds its share of the tiles of dq to global memory. Of the blocks of keys that a tile of
// queries sees the first stores, so there need be no zeros before; the others add after it has, and
// if in a fixed order, then each after the one before it has.
__device__ inline void add(const Params& p, const Memory& memory, const Share& share) {
    const int heads = int(p.group), rows = int(p.Nq), tiles = (rows + BLOCK_Q - 1) / BLOCK_Q;
    Place<1> kept;
    Place<SUM_STAGES> at;
#pragma unroll 1
    for (;; kept.next()) {
        memory.k_full().wait(kept.round);
        const Work work = memory.shared.work;
        memory.k_empty().arrive();  // safe: the work is written again by generic stores alone
        if (work.end) break;
        const u32 first_head = work.b * int(p.Hq) + work.kv * heads;
        u32 seen = 0;
#pragma unroll 1
        for (int tile = work.tiles.past; --tile >= work.tiles.first;) {
            const int row = tile * BLOCK_Q;
            const int first = Band(p, work.b).keys_of(row, min(row + BLOCK_Q, rows)).lo / BLOCK_K;
            const u32 rank = work.k0 / BLOCK_K - first, before = p.in_order ? rank : min(rank, 1u);
            const int row0 = row + share.row, count = max(0, min(DQ_ROWS, rows - row0));
#pragma unroll 1
            for (u32 head = first_head; head < first_head + heads; ++head) {
                const u32 own = (head * tiles + tile) * ADDERS + share.adder;
                while (seen < before) seen = look_reached(p.landed + own);
                if (before) is_reached();
                seen = 0;
                float* sums = static_cast<float*>(p.dq_sum) + u64(head * rows + row0) * HEAD_DIM +
                              count * share.column;
#pragma unroll 1
                for (int n = share.columns; n > 0; n -= DQ_PIECE, sums += count * DQ_PIECE) {
                    memory.sums_full(share.adder, at.stage).wait(at.round);
                    if (count)
                        send_piece(sums, memory.sums(share.adder, at.stage), 4 * count * DQ_PIECE,
                                   rank > 0);
                    wait_read_pieces();
                    memory.sums_empty(share.adder, at.stage).arrive();  // safe: the copy has read it
                    at.next();
                }
                // In order the next look is due, while this tile is on its way.
                if (p.in_order && heads == 1 && tile) seen = look_reached(p.landed + own - ADDERS);
                if (p.in_order || !rank) wait_done_pieces(), tell_reached(p.landed + own, rank + 1);
            }
        }
    }
    wait_done_pieces();
}

// Give the thread that adds them 64 rows of sums, a piece after the other.
template <int NT>
__device__ inline void send_sums(const Memory& memory, int adder, const Fragment<Sum, 1, NT>& dq,
                                 int row0, Place<SUM_STAGES>& at) {
#pragma unroll
    for (int column = 0; column < 8 * NT; column += DQ_PIECE, at.next()) {
        memory.sums_empty(adder, at.stage).wait(at.round ^ 1);
        store_sums<DQ_PIECE>(memory.sums(adder, at.stage), dq, column, row0);
        fence_shared();
        memory.sums_full(adder, at.stage).arrive();
    }
}

// Whether all of them are finite: zero times what is not finite is not zero.
template <int NT>
__device__ inline bool are_finite(const Fragment<Sum, 1, NT>& c) {
    Sum spoiled[4] = {};  // not one long chain
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) spoiled[e] = fma(c.x[0][n][e], Sum(0), spoiled[e]);
    return spoiled[0] + spoiled[1] + spoiled[2] + spoiled[3] == 0;
}

// Products become scores, -infinity where the boundary hides them.
__device__ inline void find_scores(const Params& p, const Terms& terms, int b, int h, bool boundary,
                                   TileScores& s, Slopes& slopes) {
    s.apply(terms, WarpBias<true, 1, QT>(nullptr), [&](int, int n, int e, Sum derivative) {
        if constexpr (HAS_SOFTCAP) slopes.x[0][n][e] = derivative;
    });
    if (boundary) s.hide(Sight(p, b, h), DenseMask<true, 1, QT>{});
}

// Scores become probabilities; `shifts` are those of the tile's queries.
__device__ inline void exponentiate(const Terms& terms, const float* shifts, TileScores& s) {
    const Lane lane;
    const Sum unit = terms.unit();
#pragma unroll
    for (int n = 0; n < QT; ++n) {
        const float2 shift = *reinterpret_cast<const float2*>(shifts + lane.column(0) + 8 * n);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            s.x[0][n][e] = exp2_of(fma(s.x[0][n][e], unit, -(e % 2 ? shift.y : shift.x)));
    }
}

// Products become probabilities.
__device__ inline void weigh(const Params& p, int b, int h, bool boundary, const float* shifts,
                             TileScores& s, Slopes& slopes) {
    const Terms terms(p, b, h);
    find_scores(p, terms, b, h, boundary, s, slopes);
    exponentiate(terms, shifts, s);
}

// Products of dout and v become gradients at the scores, whose probabilities times slopes are
// p(n, e); `deltas` are those of the tile's queries.
template <class Probability>
__device__ inline void find_gradients(const float* deltas, Fragment<Sum, 1, QT>& dp,
                                      Probability p) {
    const Lane lane;
#pragma unroll
    for (int n = 0; n < QT; ++n) {
        const float2 delta = *reinterpret_cast<const float2*>(deltas + lane.column(0) + 8 * n);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            dp.x[0][n][e] = p(n, e) * (dp.x[0][n][e] - (e % 2 ? delta.y : delta.x));
    }
}

// After that s is the probabilities times the slopes of the softcap.
__device__ inline void take_slopes(TileScores& s, const Slopes& slopes) {
    if constexpr (HAS_SOFTCAP)
        s.for_each([&](Sum& x, int, int, int, int n, int e) { x *= slopes.x[0][n][e]; });
}

__device__ inline void keep(Operands& kept, const Fragment<Sum, 1, QT>& c) {
#pragma unroll
    for (int i = 0; i < BLOCK_Q / 16; ++i) kept[i] = Atom<Element>::a_of(c.x[0] + 2 * i);
}

// --- To repair: NaN-safe, as told in nonfinite.cuh ------------------------------------------------

// With a softcap queries and keys, too, would have to get back what is not finite.
static_assert(!(REPAIRS && HAS_SOFTCAP), "gradients where the cap is flat are not NaN");

using SpoiledOut = NonFinite<Element, BLOCK_Q, VALUE_DIM>;
static_assert(SpoiledOut::BYTES <= PairTile::BYTES, "the table takes the place of gradients");

// All who multiply meet.
constexpr int MULTIPLYING = GROUPS * GROUP, MEETING = 1 + GROUPS;

// Whether what is not finite must be taken out of a tile: not every query sees every key. Queries past
// the end, which are zero, see none.
__device__ inline bool is_partial(const Params& p, int tile, bool boundary) {
    return boundary || (tile + 1) * BLOCK_Q > p.Nq;
}

// Make the copy of a work's keys in which zero takes the place of what is not finite.
__device__ inline void clean_keys(const Memory& memory) {
    sync_named<MULTIPLYING>(MEETING);  // nobody has a product of the last work's under way
    const NonFinite<Element, BLOCK_K, HEAD_DIM> no_table{};
    no_table.template clean_to<WARPS_M, false, false>(memory.clean_k(), memory.k(),
                                                      threadIdx.x / WARP);
    fence_shared();
    sync_named<MULTIPLYING>(MEETING);
}

// The keys whose products with gradients are dq.
__device__ inline KeyTile keys_of(const Memory& memory, bool partial) {
    return REPAIRS && partial ? memory.clean_k() : memory.k();
}

// Take what is not finite out of a tile of queries and of gradients of the output, of which it goes
// to the table; whether there was any. What TMA writes there next comes behind this fence.
__device__ inline bool clean_tile(const Memory& memory, int q, int out, const SpoiledOut& table) {
    // The scores are complete, and so are the products of the gradients whose place the table takes.
    sync_named<MULTIPLYING>(MEETING);
    const NonFinite<Element, BLOCK_Q, HEAD_DIM> no_table{};
    const int warp = threadIdx.x / WARP;
    no_table.template clean<WARPS_M, false>(memory.q(q), warp);
    const bool any = table.template clean<WARPS_M>(memory.dout(out), warp);
    // Each warp leaves word: the warpgroups may be at two places of the code.
    u32* const found = memory.shared.found;
    if (threadIdx.x % WARP == 0) found[warp] = any;
    fence_shared();
    sync_named<MULTIPLYING>(MEETING);
    return __any_sync(~0u, found[threadIdx.x % WARPS_M]);
}

// Products become probabilities, 0 of pairs that are not attended to, and so operands. dv gets what was
// taken out of dout if `spoiled`.
template <int NT>
__device__ inline Attended<1, QT> weigh_safely(const Params& p, int b, int h, bool partial,
                                               const float* shifts, TileScores& s,
                                               Operands& weights, bool spoiled,
                                               const SpoiledOut& table,
                                               Fragment<Sum, 1, NT>& dv) {
    const Terms terms(p, b, h);
    Slopes slopes;
    find_scores(p, terms, b, h, partial, s, slopes);
    Attended<1, QT> attended;
    attended.look(s);
    exponentiate(terms, shifts, s);
    attended.fill_others(s, 0);
    keep(weights, s);
    if (__any_sync(~0u, spoiled))
        inject(dv, table, 0, [&](int m, int half, int w) { return attended.word(m, half, w); });
    return attended;
}

// --------------------------------------------------------------------------------------------------

// Zero the keys and values of a work that no query sees: beyond the length, or outside all windows. What
// is not finite there would make gradients NaN. The values have come when the barrier's phase of this
// parity ends.
__device__ inline void zero_unseen(const Params& p, const Memory& memory, const Work& work,
                                   u32 parity) {
    const Range seen = Band(p, work.b).keys_of(0, int(p.Nq));
    const int first = seen.lo - work.k0, past = seen.hi - work.k0;
    if (!__any_sync(~0u, first > 0 || (past < BLOCK_K && seen.hi < p.Nk))) return;
    memory.v_full().wait(parity);
    const u32 zeros[4] = {};
    auto zero = [&](const auto& tile, int columns) {
        const int chunks = columns / 8;
#pragma unroll 1
        for (int i = threadIdx.x; i < BLOCK_K * chunks; i += MULTIPLYING) {
            const int row = i / chunks;
            if (row < first || row >= past) store_shared(tile.chunk(row, i % chunks * 16), zeros);
        }
    };
    zero(memory.k(), HEAD_DIM);
    zero(memory.v(), VALUE_DIM);
    fence_shared();
    sync_named<MULTIPLYING>(MEETING);
}

// Go through the tiles of a work that has some: the last tile of each head, then the one before it, and
// so on, so that all blocks of keys come to a tile at about the same time. Call begin() for the first
// one, and go_on(boundary) for the others; `boundary` is false where all queries see all keys.
template <class Begin, class GoOn>
__device__ __forceinline__ void walk(const Work& work, int heads, int& h, int& tile, Begin begin,
                                     GoOn go_on) {
    const Tiles tiles = work.tiles;
    const int first_head = work.kv * heads, past_head = first_head + heads;
    h = first_head, tile = tiles.past - 1;
    begin();
    ++h;
#pragma unroll 1
    for (; tile >= tiles.first; --tile, h = first_head) {
        if (tiles.boundary(tile)) {
#pragma unroll 1
            for (; h < past_head; ++h) go_on(true);
        } else {
#pragma unroll 1
            for (; h < past_head; ++h) go_on(false);
        }
    }
}

// Call visit(boundary, more) for all tiles of a work that has some: the last tile of each head, then
// the one before it, and so on, so that all blocks of keys come to a tile at about the same time.
// `boundary` is false where all queries see all keys, `more` for the last visit of all.
template <class Visit>
__device__ __forceinline__ void visit_all(const Work& work, int heads, int& h, int& tile,
                                          Visit visit) {
    const Tiles tiles = work.tiles;
    const int first_head = work.kv * heads, past_head = first_head + heads;
    if constexpr (REPAIRS) {  // one copy of the visit is compiled sooner
#pragma unroll 1
        for (tile = tiles.past - 1; tile >= tiles.first; --tile) {
            const bool boundary = __any_sync(~0u, tiles.boundary(tile));
#pragma unroll 1
            for (h = first_head; h < past_head; ++h)
                visit(boundary, tile > tiles.first || h + 1 < past_head);
        }
    } else {
#pragma unroll 1
        for (tile = tiles.past - 1; tile >= tiles.first; --tile) {
            const int past = past_head - (tile == tiles.first);  // the last of all is apart
            if (tiles.boundary(tile)) {
#pragma unroll 1
                for (h = first_head; h < past; ++h) visit(true, true);
            } else {
#pragma unroll 1
                for (h = first_head; h < past; ++h) visit(false, true);
            }
        }
        h = past_head - 1, tile = tiles.first;
        visit(true, false);
    }
}
