// Forward pass: one CTA for each block of queries, key tiles ascending. Mirrors forward_block in spec.py.
// Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 1.
//
// If the output is not finite, and not all queries attend to the non-finite values, a second, NaN-safe pass
// computes the block again (nonfinite.cuh). Rows that attend only to finite values get the same bits from
// both passes.
//
// With SPLIT_FLOATS each GEMM is three GEMMs of float16 numbers (split_forward.cuh). A head fails as in
// forward_float32_sm90.cu, and is computed again without SPLIT_FLOATS. There is no second pass.
#include "head_flags.cuh"
#include "long_sums.cuh"
#include "nonfinite.cuh"
#include "pair.cuh"
#include "rows.cuh"
#include "softmax.cuh"
#include "split_forward.cuh"
#include "tile_scheduler.cuh"

constexpr int MT = BLOCK_Q / (16 * WARPS_M);  // 16-row tiles of a warp
constexpr int NT = BLOCK_K / (8 * WARPS_N);   // 8-column tiles of its scores
constexpr int VT = VALUE_COLUMNS / (8 * WARPS_N);
static_assert(NT % 2 == 0 && VT % 2 == 0, "atoms are loaded in pairs");
static_assert(!PAIR || WARPS_N == 1, "the P tile takes the other CTA's part of the scores");

using QueryTile = Tile<Element, BLOCK_Q, HEAD_COLUMNS>;
using KeyTile = Tile<Operand, BLOCK_K, tile_columns(HEAD_COLUMNS)>;
using ValueTile = Tile<Operand, BLOCK_K, tile_columns(VALUE_COLUMNS)>;
using OutTile = Tile<Element, BLOCK_Q, VALUE_COLUMNS>;
using ScoreTile = Tile<Element, BLOCK_Q, BLOCK_K>;
// Split queries are in registers, and the results take the place of the stages and the bias.
constexpr int FIRST_BYTES = SPLIT_FLOATS                        ? 0
                            : QueryTile::BYTES > OutTile::BYTES ? QueryTile::BYTES
                                                                : OutTile::BYTES;
static_assert(!SPLIT_FLOATS || (WARPS_N == 1 && !PAIR), "a warp has all columns of its rows");

using NonFiniteTable = NonFinite<Element, BLOCK_K, VALUE_COLUMNS>;
static_assert(NonFiniteTable::BYTES <= KeyTile::BYTES, "the table takes the k tile");

// The work tile of a CTA: BLOCK_Q queries of a head, and some columns of v.
struct WorkTile {
    int b, h, q0, column, columns;

    __device__ static int column_blocks(const Params& p) {
        return max(1, int((p.Dv + VALUE_DIM - 1) / VALUE_DIM));
    }
    __device__ static i64 count(const Params& p) {
        return p.B * p.Hq * column_blocks(p) * block_count<BLOCK_Q>(p, p.Nq);
    }
    __device__ WorkTile(const Params& p, int index) {
        const int q_blocks = block_count<BLOCK_Q>(p, p.Nq), column_blocks = WorkTile::column_blocks(p);
        const BlockCoord coord(q_blocks, int(p.B * p.Hq) * column_blocks, int(p.head_groups), index);
        // Longest first: with a causal mask the last queries have most keys.
        const int number = p.right < 0 ? coord.block : q_blocks - 1 - coord.block;
        const HeadBlock<BLOCK_Q> at(p, p.query_ends(), int(p.Hq), coord.head / column_blocks,
                                    number);
        b = at.b, h = at.h, q0 = at.block * BLOCK_Q;
        column = coord.head % column_blocks * VALUE_DIM + own_half() * VALUE_COLUMNS;
        columns = min(VALUE_COLUMNS, int(p.Dv) - column);
    }
};

// The key tiles of a block of queries.
__device__ inline auto key_tiles_of(const AttentionMask& attn_mask, int q0, Range keys) {
    return TileIterator(keys.lo / BLOCK_K, (keys.hi + BLOCK_K - 1) / BLOCK_K, [=](int tile) {
        return attn_mask.kind(q0, q0 + BLOCK_Q, tile * BLOCK_K, tile * BLOCK_K + BLOCK_K);
    });
}

constexpr int LANES = lanes_of_row(HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM);

// True if a tile has a non-finite value to which not all queries attend: it is masked out for some, or its
// score may be -infinity. If all queries attend to the value, the first pass was right.
__device__ inline bool needs_nan_safe(const Params& p, const WorkTile& work) {
    const Head head(p, work.b, work.h);
    const int first = threadIdx.x / LANES, q_end = min(work.q0 + BLOCK_Q, int(head.Nq()));
    bool good = true;
    for (int i = work.q0 + first; i < q_end; i += THREADS / LANES)
        good = good && is_finite_row<LANES>(head.q + i * p.q_at.n, int(p.D));
    const bool all_pairs = HAS_ANY_SCORES || __syncthreads_or(!good);
    // Both CTAs of a pair must get the same result.
    const int column = PAIR ? 0 : work.column, columns = PAIR ? int(p.Dv) : work.columns;
    const Range keys = head.attn_mask.window.key_range(work.q0, q_end);
    bool non_finite = false;
    for (auto tiles = key_tiles_of(head.attn_mask, work.q0, keys); !tiles.done(); tiles.next()) {
        const int k0 = tiles.tile * BLOCK_K, k_end = min(k0 + BLOCK_K, keys.hi);
#pragma unroll 1
        for (int j0 = k0; j0 < k_end; j0 += THREADS / LANES) {
            const int j = min(j0 + first, k_end - 1);
            const u32 bad = __ballot_sync(
                ~0u, !is_finite_row<LANES>(head.v + j * p.v_at.n + column, columns));
            if (!bad) continue;
            constexpr u32 ROW = LANES == WARP ? ~0u : (1u << LANES) - 1;
            if (bad >> threadIdx.x % WARP / LANES * LANES & ROW)
                non_finite = non_finite || all_pairs || tiles.kind == PARTIAL ||
                             !is_finite_row<LANES>(head.k + j * p.k_at.n, int(p.D));
        }
    }
    return __syncthreads_or(non_finite);
}

// Add the non-finite values of v to the rows that attend to them. Warps that share rows exchange their
// parts of `attended` through the P tile.
__device__ inline void restore_non_finite(Fragment<Accum, MT, VT>& acc, const NonFiniteTable& table,
                                          const Attended<MT, NT>& attended, const ScoreTile& p_tile,
                                          const RowGroup& group, int column0, int value0) {
    if constexpr (WARPS_N > 1) {
        const AttendedRows<ScoreTile::PITCH> rows{p_tile.address};
        rows.store(attended, group.row0, column0);
        group.sync();
        add_non_finite(acc, table, value0, [&](int m, int half, int w) {
            return load_shared(rows.at(group.row0 + 16 * m + Lane().row(2 * half), w));
        });
        group.sync();  // all warps have read it
    } else {
        add_non_finite(acc, table, value0,
                       [&](int m, int half, int w) { return attended.word(m, half, w); });
    }
}

template <bool NAN_SAFE>
__device__ void forward_block(const Params& p, const WorkTile& work, int index);

// Not inlined, so that it costs the first pass no registers. A template, so that it is compiled only where it is
// called. float32 always runs it after a non-finite output: in the first pass the tf32 parts turn infinity into NaN.
template <bool NAN_SAFE>
__device__ __noinline__ void forward_block_nan_safe(const Params& p, int index) {
    const WorkTile work(p, index);
    if (sizeof(Element) == 4 || needs_nan_safe(p, work)) forward_block<NAN_SAFE>(p, work, index);
}

template <bool NAN_SAFE>
__device__ inline void forward_block(const Params& p, const WorkTile& work, int index) {
    constexpr bool SPLIT = SPLIT_FLOATS && !NAN_SAFE;
    extern __shared__ __align__(1024) char memory[];
    const QueryTile q_tile(memory);
    const OutTile out_tile(memory);  // overlays q at the end
    auto k_tile = [&](int stage) {
        return KeyTile(memory + FIRST_BYTES + stage * (KeyTile::BYTES + ValueTile::BYTES));
    };
    auto v_tile = [&](int stage) { return ValueTile(k_tile(stage).base + KeyTile::BYTES); };
    const ScoreTile p_tile(k_tile(STAGES).base);  // if warps share rows, or CTAs share scores
    const WarpBias<false, MT, NT> bias(p_tile.base + (PAIR || WARPS_N > 1 ? ScoreTile::BYTES : 0));

    const int q0 = work.q0, column = work.column, columns = work.columns;
    const int d0 = own_half() * HEAD_COLUMNS;
    const Head head(p, work.b, work.h);
    const RowGroup group(16 * MT);
    const int row0 = group.row0, column0 = group.warp_n * NT * 8;  // this warp's first score
    const int value0 = group.warp_n * VT * 8;                      // its first column of out

    const Range keys = head.attn_mask.window.key_range(q0, min(q0 + BLOCK_Q, int(head.Nq())));
    SplitForward<SPLIT, MT> split(p, head, q0 + row0);
    auto load_keys = [&](int k0, int stage) {
        if constexpr (SPLIT)
            split.load_keys(k_tile(stage), k0, keys.hi);
        else
            k_tile(stage).template load<THREADS, ALIGNMENT_BYTES>(head.k + k0 * p.k_at.n + d0, p.k_at.n,
                                                                  keys.hi - k0, int(p.D) - d0);
        copy_commit();
    };
    auto load_values = [&](int k0, int stage) {
        if constexpr (SPLIT)
            split.load_values(v_tile(stage), k0, keys.hi);
        else
            v_tile(stage).template load<THREADS, ALIGNMENT_BYTES>(head.v + k0 * p.v_at.n + column,
                                                                  p.v_at.n, keys.hi - k0, columns);
        copy_commit();
    };
    auto load_bias = [&](int k0) { bias.load(head.score_mod, q0 + row0, k0 + column0); };

    if constexpr (!SPLIT) {
        q_tile.template load<THREADS, ALIGNMENT_BYTES>(head.q + q0 * p.q_at.n + d0, p.q_at.n,
                                                       int(head.Nq()) - q0, int(p.D) - d0);
        copy_commit();
    }
    __shared__ Mail::Barriers barriers;
    Mail mail(barriers);
    if constexpr (PAIR) arrive_at_peer(), wait_for_peer(), mail.release();
    RowState<MT> state;
    Fragment<Accum, MT, VT> acc;
    LongSums<MT> long_sums;
    int done = 0;  // tiles
    // It computes the work tile and the head again: registers need not keep them during the loop.
    auto add_total = [&](bool has_total, bool is_last) {
        if constexpr (SPLIT) {
            const WorkTile work(p, index);
            const Head head(p, work.b, work.h);
            int row = row0;
            hide(row);  // otherwise the loop keeps addresses in registers
            row += work.q0;
            Element* const out = head.sequence.queries<Element>(p.out, p.out_at, head.h) + row * p.out_at.n;
            const RowResults results{{out, p.out_at.n, int(head.Nq()) - row, int(p.Dv)},
                                     static_cast<Accum*>(p.lse) + head.row(row)};
            long_sums.add_total(results, state, acc, has_total, is_last);
        }
    };
    auto tiles = key_tiles_of(head.attn_mask, q0, keys);
    acc.clear();
    // The dense mask is loaded a tile ahead: PV leaves it registers, and covers its latency.
    DenseMask<false, MT, NT> dense;
    auto load_mask = [&] {
        if (HAS_MASK && !tiles.done())
            dense.load(head.attn_mask, q0 + row0, tiles.tile * BLOCK_K + column0);
    };
    load_mask();
    // One stage: v is loaded during QK, the next k during PV. Two stages: both are loaded a tile
    // ahead. The next bias is loaded once this one has been added.
    //
    //     step              copies in flight (one stage / two)       stages held
    //     wait              - / -                                    k(j) / k(j), v(j)
    //     QK                v(j) / k(j + 1), v(j + 1)                k(j) / k(j), v(j)
    //     softmax           k(j + 1) / k(j + 1), v(j + 1)            v(j)
    //     PV                k(j + 1) / k(j + 1), v(j + 1)            v(j)
    int stage = 0;
    if (!tiles.done()) {
        load_keys(tiles.tile * BLOCK_K, 0);
        if (STAGES > 1) load_values(tiles.tile * BLOCK_K, 0);
        load_bias(tiles.tile * BLOCK_K);
    }
    while (!tiles.done()) {
        const int k0 = tiles.tile * BLOCK_K, kind = tiles.kind;
        const KeyTile k = k_tile(stage);
        const ValueTile v = v_tile(stage);
        copy_wait<0>();
        __syncthreads();  // k has landed, and all warps are done with the previous tile
        tiles.next();
        if (STAGES == 1) {
            load_values(k0, 0);
        } else if (!tiles.done()) {
            load_keys(tiles.tile * BLOCK_K, stage ^= 1);
            load_values(tiles.tile * BLOCK_K, stage);
        }
        if constexpr (HAS_MASK) dense.share();
        int row = q0 + row0;
        if constexpr (SPLIT) hide(row);  // so that the keys of each row are not kept in registers
        Scores<false, MT, NT> s(row, k0 + column0);
        // With many columns, unroll all steps: here there are registers for their operands.
        constexpr bool FEW = NAN_SAFE || PAIR || HEAD_COLUMNS <= 64;
        constexpr int UNROLL = FEW ? STEPS<NAN_SAFE, HEAD_COLUMNS> : HEAD_COLUMNS / 16;
        if constexpr (SPLIT)
            split.multiply_keys(s, k, k0);
        else
            multiply<HEAD_COLUMNS, UNROLL, false, NAN_SAFE>(s, q_tile, row0, k, column0);
        if constexpr (PAIR) {
            mail.send(p_tile, s, row0, column0);
            mail.add(p_tile, s, row0, column0);
            mail.release();
        }
        s.apply(head.score_mod, bias, [](int, int, int, Accum, Accum) {});
        if (HAS_MASK || kind == PARTIAL) s.masked_fill(head.attn_mask, dense);
        if (STAGES == 1) {
            copy_wait<0>();
            __syncthreads();  // v has landed, and all warps are done with k
            if (!NAN_SAFE && !tiles.done()) load_keys(tiles.tile * BLOCK_K, 0);
        }
        if (!tiles.done()) load_bias(tiles.tile * BLOCK_K);
        const NonFiniteTable table{k.address};
        Attended<MT, NT> attended;
        bool non_finite = false;
        if constexpr (NAN_SAFE) {
            // If all pairs are attended, non-finite values propagate by themselves, except in tf32 parts,
            // where infinity becomes NaN. After the barrier all warps are done with k.
            const bool all = attended.mark(s) && sizeof(Element) != 4;
            non_finite = __syncthreads_or(!all) &&
                         __syncthreads_or(table.clean<WARPS_M * WARPS_N>(v, threadIdx.x / WARP));
        }
        Accum rescale[MT][2];
        constexpr int THRESHOLD = SPLIT ? RESCALE_THRESHOLD : 0;
        state.template update<THRESHOLD>(s, head.score_mod.softmax_scale_log2(), group, rescale);
        acc.scale_rows(rescale);
        if constexpr (SPLIT) long_sums.scale(rescale);
        load_mask();
        // 16 keys at a time, so that computing random bits overlaps with the mma of other keys.
        auto drop = [&](int n) { s.drop(head.dropout, n); };
        if constexpr (NAN_SAFE) {
#pragma unroll
            for (int n = 0; n < NT; n += 2)
                s.drop(head.dropout, n, [&](int m, int n, int e) { attended.drop(m, n, e); });
            if (non_finite) {
                restore_non_finite(acc, table, attended, p_tile, group, column0, value0);
                if (STAGES == 1) __syncthreads();  // all warps are done with the table
            }
            if (STAGES == 1 && !tiles.done()) load_keys(tiles.tile * BLOCK_K, 0);
        }
        if constexpr (SPLIT) {
            split.add_values(acc, s, v, k0, drop);
            if (++done % GROUP_TILES == 0 && !tiles.done()) add_total(done > GROUP_TILES, false);
        } else if constexpr (WARPS_N > 1) {
            if constexpr (!NAN_SAFE)
#pragma unroll
                for (int n = 0; n < NT; n += 2) drop(n);
            store_fragment(p_tile, s, row0, column0);
            group.sync();
            multiply_rows<false, BLOCK_K, STEPS<NAN_SAFE, BLOCK_K>>(acc, p_tile, row0, v, value0);
        } else if constexpr (NAN_SAFE) {
            multiply(acc, s, v, 0);
        } else {
            multiply(acc, s, v, 0, drop);
        }
    }
    copy_wait<0>();
    if constexpr (PAIR) arrive_at_peer(), wait_for_peer();  // no store to either CTA is in flight
    __syncthreads();  // all warps are done with q
    if constexpr (SPLIT)
        if (done > GROUP_TILES) add_total(true, true);
    state.reduce_sums(group);
    // Normalise and store the results. Returns true if they are not good.
    auto finish = [&](const WorkTile& work, const Head& head) {
        const Lane lane;
        const Accum sink = head.sink();
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Accum lse;
                const Accum inverse =
                    state.finalize(m, half, sink, Accum(p.dropout_scale), Accum(p.softmax_scale), lse);
#pragma unroll
                for (int n = 0; n < VT; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) acc.x[m][n][e] *= inverse;
                const int i = work.q0 + row0 + 16 * m + lane.row(2 * half);
                if (lane.t == 0 && value0 == 0 && own_half() == 0 && i < head.Nq())
                    static_cast<Accum*>(p.lse)[head.row(i)] = lse;
            }
        store_fragment(out_tile, acc, row0, value0);
        bool bad = !NAN_SAFE && !acc.all_finite();
        if constexpr (SPLIT) bad = bad || !split.keeps_digits();
        bad = any_of_work_tile(bad);
        out_tile.template store<THREADS, ALIGNMENT_BYTES>(
            head.sequence.queries<Element>(p.out, p.out_at, head.h) + work.q0 * p.out_at.n + work.column,
            p.out_at.n, int(head.Nq()) - work.q0, work.columns);
        return bad;
    };
    if constexpr (SPLIT) {
        const WorkTile again(p, index);  // so that nothing of the work tile is kept in registers
        if (finish(again, Head(p, again.b, again.h)) && threadIdx.x == 0) fail_query_head(p, again.b, again.h);
    } else {
        if (!finish(work, head) || NAN_SAFE) return;
        __syncthreads();  // all warps have stored
        forward_block_nan_safe<true>(p, index);
    }
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    forward(const __grid_constant__ Params p) {
    overlap_launches();
    for_blocks(p, WorkTile::count(p), [&](int index) {
        const WorkTile work(p, index);
        if (PACKED && work.q0 >= Sequence(p, work.b).Nq) return;  // no work tile
        if (ONLY_FLAGGED && !(query_head_flags(p, work.b, work.h) & FLAGGED_HEADS)) return;
        forward_block<false>(p, work, index);
    });
}
