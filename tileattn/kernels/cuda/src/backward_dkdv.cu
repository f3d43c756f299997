// Backward pass for k and v: one CTA for each block of keys, query tiles ascending, the query heads that
// share the keys one after the other. dK and dV stay in registers. With ADD_DQ, dQ is added in device
// memory, in the accumulator type. With WRITE_DQ the block has all keys, so dQ of a tile is complete. S is computed transposed, with keys in rows. Dao, FlashAttention-2,
// arXiv:2307.08691, Algorithm 2.
//
// Flagged heads, and key blocks whose gradients are not finite, are computed by another pass, which is
// NaN-safe (nonfinite.cuh) and handles large scores. It leaves dQ to backward_dq.
#include "backward_specialised.cuh"

static_assert(!(SPLIT_Q && WRITE_DQ), "a CTA that flags a head has it alone");

constexpr int MT = BLOCK_K / (16 * WARPS_M);  // keys of a warp, in 16-row tiles
constexpr int QT = BLOCK_Q / (8 * WARPS_N);   // queries of a warp's scores, in 8-column tiles

// If possible, half of the warps that share keys compute dV and the other half dK, each with twice as many
// columns: fewer operands to load. Wider elements have too few registers for this.
constexpr bool APART = WARPS_N % 2 == 0 && HEAD_DIM == VALUE_DIM && sizeof(Element) == 2;

// With one stage, dO is loaded during S, not during dQ of the previous tile, so dQ can come before dV. Not
// if each warp has all queries: then P and dS stay in registers, and there is no barrier after S.
constexpr bool DOUT_DURING_S = STAGES == 1 && WARPS_N > 1;

// A warp that has all queries computes dK and dV of its own keys, with P and dS in registers.
template <int COLUMNS>
using KeyWarpTile = WarpTile<BLOCK_K, COLUMNS,
                             APART          ? WARPS_N / 2
                             : WARPS_N == 1 ? 1
                                            : across<BLOCK_K, COLUMNS>(),
                             APART ? WARPS / 2 : WARPS>;
using DkWarpTile = KeyWarpTile<HEAD_COLUMNS>;
using DvWarpTile = KeyWarpTile<VALUE_COLUMNS>;
using DqWarpTile = WarpTile<BLOCK_Q, HEAD_COLUMNS, across<BLOCK_Q, HEAD_COLUMNS>()>;
static_assert(QT % 2 == 0, "atoms are loaded in pairs");

using NonFiniteQ = NonFinite<Element, BLOCK_Q, HEAD_COLUMNS>;
using NonFiniteDout = NonFinite<Element, BLOCK_Q, VALUE_COLUMNS>;
static_assert(NonFiniteQ::BYTES <= ScoreTile::BYTES && NonFiniteDout::BYTES <= ScoreTile::BYTES,
              "tables take the P tile");

// Add the non-finite values of q or dO to the keys that they attend to. Warps that share keys exchange
// their parts of `attended` through a score tile that is free. All threads call; `mine` is false in warps
// without these sums.
template <class Table, class Sums, class Own>
__device__ inline void restore_non_finite(Sums& sums, const Table& table,
                                          const Attended<MT, QT>& attended, const ScoreTile& free,
                                          int row0, int column0, const Own& own, bool mine) {
    if constexpr (WARPS_N > 1) {
        const AttendedRows<ScoreTile::PITCH> rows{free.address};
        rows.store(attended, row0, column0);
        __syncthreads();
        if (mine)
            add_non_finite(sums, table, own.column, [&](int m, int half, int w) {
                return load_shared(rows.at(own.row + 16 * m + Lane().row(2 * half), w));
            });
    } else {
        add_non_finite(sums, table, 0,
                       [&](int m, int half, int w) { return attended.word(m, half, w); });
    }
    __syncthreads();  // all warps have read it
}

// The largest excess of all warps, nearly always 1. Warps share dS, so they must scale it alike.
__device__ inline Accum largest_of(Accum mine, int warp) {
    __shared__ Accum all[WARPS];
    if (!HAS_FINITE_SUMS<Element> || !__syncthreads_or(mine > 1)) return 1;
    all[warp] = mine;
    __syncthreads();
    Accum largest = 1;
    for (Accum x : all) largest = fmax(largest, x);
    return largest;
}

// Compute dK and dV of a block of keys. Returns false, and stores nothing, if they are not finite. The first
// pass computes a split of the queries, and stores the sums of all splits if it is the last to finish.
template <bool NAN_SAFE>
__device__ inline bool backward_block(const Params& p, const KeyBlock& at) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(16) Accum lse_log2[STAGES][BLOCK_Q], deltas[STAGES][BLOCK_Q];
    const KeyTile k_tile{memory};
    const ValueTile v_tile{k_tile.base + KeyTile::BYTES};
    const ScoreTile p_tile{v_tile.base + ValueTile::BYTES};
    const ScoreTile ds_tile{p_tile.base + (PAIR || WARPS_N > 1 ? ScoreTile::BYTES : 0)};
    char* const stages = ds_tile.base + ScoreTile::BYTES;
    auto q_tile = [&](int stage) {
        return QueryTile(stages + stage * (QueryTile::BYTES + DoutTile::BYTES));
    };
    auto dout_tile = [&](int stage) { return DoutTile(q_tile(stage).base + QueryTile::BYTES); };
    const WarpBias<true, MT, QT> bias(q_tile(STAGES).base);

    const int k0 = at.block * BLOCK_K, b = at.b, kv = at.h;
    const int warp = threadIdx.x / WARP, warp_m = warp / WARPS_N, warp_n = warp % WARPS_N;
    const int row0 = warp_m * MT * 16, column0 = warp_n * QT * 8;  // this warp's first score
    const bool only_dk = APART && warp_n >= WARPS_N / 2;
    const int tile_index = APART ? warp_m * (WARPS_N / 2) + warp_n % (WARPS_N / 2) : warp;
    const DkWarpTile of_dk(tile_index);
    const DvWarpTile of_dv(tile_index);
    const DqWarpTile of_dq(warp);
    const int d0 = own_half() * HEAD_COLUMNS, dv0 = own_half() * VALUE_COLUMNS;
    const Lane lane;

    // With several copies of dbias each batch entry has its own. Then BiasElement is Accum.
    void* const dbias = p.dbias_copies > 1 ? p.dbias_sums : p.dbias;
    const Sequence sequence(p, b);
    const SlidingWindow window(p, sequence);
    const QuerySplit<SPLIT_Q && !NAN_SAFE> split(p, at.split);
    // With WRITE_DQ no tile is skipped, so that each row of dQ is written.
    const Range all = WRITE_DQ ? Range{0, int(sequence.Nq)} : window.query_range(k0, k0 + BLOCK_K);
    const Range queries = split.clip(p, all);
    load_key_block(p, sequence, window, kv, k0, k_tile, d0, v_tile, dv0);
    Fragment<Accum, DvWarpTile::MT, DvWarpTile::NT> dv;  // or dK
    Fragment<Accum, DkWarpTile::MT, APART ? 1 : DkWarpTile::NT> dk;
    dk.clear();
    dv.clear();
    auto scale_dk = [&](Accum factor) {
        if constexpr (!APART) {
            dk.scale(factor);
        } else if (only_dk) {
            dv.scale(factor);
        }
    };
    __shared__ Mail::Barriers barriers[PAIR ? 2 : 1];
    Mail s_mail(barriers[0]), dp_mail(barriers[PAIR]);
    if constexpr (PAIR) arrive_at_peer(), wait_for_peer();
    for (int g = split.begin(); g < split.end(p); ++g) {
        const Head head(p, b, kv * int(p.group) + g);
        TileIterator tiles(queries.lo / BLOCK_Q, (queries.hi + BLOCK_Q - 1) / BLOCK_Q, [&](int n) {
            const int kind =
                head.attn_mask.kind(n * BLOCK_Q, n * BLOCK_Q + BLOCK_Q, k0, k0 + BLOCK_K);
            return WRITE_DQ && kind == EMPTY ? PARTIAL : kind;
        });
        auto load_q = [&](int q0, int stage) {
            q_tile(stage).template load<THREADS, ALIGNMENT_BYTES>(
                head.q + q0 * p.q_at.n + d0, p.q_at.n, int(sequence.Nq) - q0, int(p.D) - d0);
            copy_row<THREADS>(lse_log2[stage], head.lse_log2() + q0);
            copy_commit();
        };
        auto load_dout = [&](int q0, int stage) {
            dout_tile(stage).template load<THREADS, ALIGNMENT_BYTES>(
                head.dout + q0 * p.dout_at.n + dv0, p.dout_at.n, int(sequence.Nq) - q0,
                int(p.Dv) - dv0);
            copy_row<THREADS>(deltas[stage], head.delta() + q0);
            copy_commit();
        };
        auto load_bias = [&](int q0) { bias.load(head.score_mod, q0 + column0, k0 + row0); };
        // With one stage the next q is loaded after dK. With two, q and dO are loaded a tile ahead.
        auto hand_back = [&](auto load) {
            if (STAGES > 1) return;
            __syncthreads();  // all warps are done with q, or with dO
            if (!tiles.done()) load(tiles.tile * BLOCK_Q, 0);
        };
        // At the end of a tile, so that the work on the next one comes after the barrier.
        auto land = [] {
            copy_wait<0>();
            __syncthreads();  // q, or q and dO, have landed, and all warps are done with the previous tile
        };
        int stage = 0;
        if (!tiles.done()) {
            load_bias(tiles.tile * BLOCK_Q);
            load_q(tiles.tile * BLOCK_Q, 0);
            if (!DOUT_DURING_S) load_dout(tiles.tile * BLOCK_Q, 0);
        }
        land();
        while (!tiles.done()) {
            const int q0 = tiles.tile * BLOCK_Q, kind = tiles.kind, now = stage;
            const QueryTile q = q_tile(stage);
            const DoutTile dout = dout_tile(stage);
            if constexpr (PAIR) s_mail.release(), dp_mail.release();
            if (DOUT_DURING_S) load_dout(q0, 0);
            tiles.next();
            if (STAGES > 1 && !tiles.done()) {
                load_q(tiles.tile * BLOCK_Q, stage ^= 1);
                load_dout(tiles.tile * BLOCK_Q, stage);
            }

            auto query = [&](int n, int e) { return column0 + 8 * n + lane.column(e); };
            TileGradient<true, MT, QT, NAN_SAFE> tile(k0 + row0, q0 + column0);
            tile.load_mask(head.attn_mask);
            multiply<HEAD_COLUMNS, STEPS<NAN_SAFE, HEAD_COLUMNS>, true, NAN_SAFE>(
                tile.p, k_tile, row0, q, column0);
            // Queries past the end may have scores of 0 x NaN.
            const bool past_end = NAN_SAFE && q0 + BLOCK_Q > sequence.Nq;
            auto recompute_p = [&] {
                tile.recompute_p(
                    head.score_mod, bias, head.attn_mask, head.dropout, past_end ? PARTIAL : kind,
                    NAN_SAFE && head.needs_max_first(),
                    [&](int, int n, int e) { return head.row_max()[q0 + query(n, e)]; },
                    [&](int, int n, int e) { return lse_log2[now][query(n, e)]; });
            };
            if constexpr (PAIR) {
                s_mail.send(p_tile, tile.p, row0, column0);
            } else {
                recompute_p();
            }
            if constexpr (DOUT_DURING_S) {
                copy_wait<0>();
                __syncthreads();  // dO has landed
            }
            multiply<VALUE_COLUMNS, STEPS<NAN_SAFE, VALUE_COLUMNS>, false, NAN_SAFE>(
                tile.ds, v_tile, row0, dout, column0);
            if constexpr (PAIR) {
                dp_mail.send(ds_tile, tile.ds, row0, column0);
                s_mail.add(p_tile, tile.p, row0, column0);
                recompute_p();
                dp_mail.add(ds_tile, tile.ds, row0, column0);
            }
            tile.compute_ds(Accum(p.dropout_scale),
                            [&](int, int n, int e) { return deltas[now][query(n, e)]; });
            if constexpr (WRITE_DBIAS)
                if (own_half() == 0)
                    bias.write(static_cast<BiasElement*>(dbias) + head.row(0) * p.Nk,
                               head.score_mod, q0 + column0, k0 + row0, tile.ds);
            if (!tiles.done()) load_bias(tiles.tile * BLOCK_Q);
            tile.apply_dsoftcap();
            // If all pairs are attended, non-finite values propagate by themselves. After this barrier all
            // warps are done with the uncleaned q and dO.
            if (NAN_SAFE && (HAS_MASK || HAS_ANY_SCORES || kind == PARTIAL || past_end) &&
                __syncthreads_or(tile.any_masked())) {
                const NonFiniteQ of_q{p_tile.address};
                const NonFiniteDout of_dout{p_tile.address};
                // A non-finite query makes dS NaN, unless a score modifier has derivative 0 there.
                const bool bad_q = __syncthreads_or(of_q.clean<WARPS, HAS_SCORE_GRAD>(q, warp));
                if (HAS_SCORE_GRAD && bad_q) {
                    if constexpr (APART)
                        restore_non_finite(dv, of_q, tile.attended(), ds_tile, row0, column0,
                                           of_dv, only_dk);
                    else
                        restore_non_finite(dk, of_q, tile.attended(), ds_tile, row0, column0,
                                           of_dk, true);
                }
                if (__syncthreads_or(of_dout.clean<WARPS>(dout, warp)))
                    restore_non_finite(dv, of_dout, tile.attended(), ds_tile, row0, column0, of_dv,
                                       !only_dk);
            }
            tile.zero_dropped();
            const Accum excess = NAN_SAFE ? largest_of(tile.excess(), warp) : Accum(1);
            if (excess > 1) tile.ds.scale(1 / excess), scale_dk(1 / excess);

            // If dQ is not finite, it stays so in memory, and backward_dq_convert flags the head.
            const bool has_dq = ADD_DQ && !NAN_SAFE && of_dq.any();
            using DqFragment = Fragment<Accum, DqWarpTile::MT, DqWarpTile::NT>;
            auto compute_dq = [&] {
                DqFragment dq;
                dq.clear();
                multiply_rows<true, BLOCK_K, STEPS<NAN_SAFE, BLOCK_K>>(dq, ds_tile, of_dq.row,
                                                                       k_tile, of_dq.column);
                return dq;
            };
            auto dq_sums = [&] {
                return static_cast<Accum*>(p.dq_accum) + head.row(q0) * HEAD_DIM + d0;
            };
            auto add_dq = [&](Accum* sums, const DqFragment& dq, int part = 0, int parts = 1) {
                add_rows(sums, HEAD_DIM, dq, of_dq.row, of_dq.column, int(sequence.Nq) - q0, part,
                         parts);
            };
            // If dQ is not finite, the head is flagged for backward_dq.
            auto write_dq = [&](DqFragment dq) {
                dq.scale(Accum(p.scale));
                if (!dq.all_finite()) flag_head(p, b, kv, NON_FINITE);
                store_rows<ALIGNMENT_BYTES>(
                    sequence.queries<Element>(p.dq, p.dq_at, head.h) + q0 * p.dq_at.n + d0,
                    p.dq_at.n, dq, of_dq.row, of_dq.column, int(sequence.Nq) - q0, int(p.D) - d0);
            };
            auto finish_dq = [&] {
                if constexpr (WRITE_DQ)
                    write_dq(compute_dq());
                else
                    add_dq(dq_sums(), compute_dq());
            };
            if constexpr (ADD_DQ || WARPS_N > 1) store_fragment(ds_tile, tile.ds, row0, column0);
            if constexpr (WARPS_N > 1) {
                store_fragment(p_tile, tile.p, row0, column0);
                __syncthreads();  // P and dS of all queries are stored
                constexpr int UNROLL = STEPS<NAN_SAFE, BLOCK_Q>;
                if constexpr (APART) {
                    const ScoreTile operand(p_tile.base + only_dk * ScoreTile::BYTES);
                    const DoutTile rows(q.base + !only_dk * QueryTile::BYTES);
                    multiply_rows<false, BLOCK_Q, UNROLL>(dv, operand, of_dv.row, rows,
                                                          of_dv.column);
                    hand_back(load_q);
                    if (has_dq) finish_dq();
                } else {
                    multiply_rows<false, BLOCK_Q, UNROLL>(dk, ds_tile, of_dk.row, q, of_dk.column);
                    hand_back(load_q);
                    // The adds to dQ overlap with dV, which loads few operands. In float64 there are many
                    // adds: in one burst they would delay the loads of the next tile, so they are spread
                    // over the steps of dV.
                    constexpr bool SPREAD =
                        ADD_DQ && !WRITE_DQ && !NAN_SAFE && sizeof(Element) == 8 && DqWarpTile::ALL;
                    if constexpr (SPREAD) {
                        Accum* const sums = dq_sums();
                        const DqFragment dq = compute_dq();
                        multiply_rows<false, BLOCK_Q, UNROLL>(
                            dv, p_tile, of_dv.row, dout, of_dv.column,
                            [&](int step, int steps) { add_dq(sums, dq, step, steps); });
                    } else {
                        if (has_dq) finish_dq();
                        multiply_rows<false, BLOCK_Q, UNROLL>(dv, p_tile, of_dv.row, dout,
                                                              of_dv.column);
                    }
                }
            } else {
                multiply(dk, tile.ds, q, 0);
                hand_back(load_q);
                multiply(dv, tile.p, dout, 0);
                hand_back(load_dout);
                if constexpr (ADD_DQ && STAGES > 1) __syncthreads();  // dS of all keys is stored
                if (has_dq) finish_dq();
            }
            if (excess > 1) scale_dk(excess);
            land();
        }
    }
    if constexpr (PAIR) arrive_at_peer(), wait_for_peer();  // no store to either CTA is in flight
    if constexpr (SPLIT_Q && !NAN_SAFE) {
        bool is_last;
        if constexpr (APART)
            is_last = join_splits(p, at, dv);
        else
            is_last = join_splits(p, at, dk, dv);
        if (!is_last) return true;
    }
    // After this barrier all warps are done with k and v.
    if (__syncthreads_or(!NAN_SAFE && (!dk.all_finite() || !dv.all_finite()))) return false;

    dv.scale(Accum(only_dk ? p.scale : p.dropout_scale * BACKWARD_P_UNIT));
    dk.scale(Accum(p.scale));
    if constexpr (APART) {
        const ValueTile mine(k_tile.base + !only_dk * KeyTile::BYTES);
        store_fragment(mine, dv, of_dv.row, of_dv.column);
    } else {
        store_fragment(v_tile, dv, of_dv.row, of_dv.column);
        store_fragment(k_tile, dk, of_dk.row, of_dk.column);
    }
    __syncthreads();
    k_tile.template store<THREADS, ALIGNMENT_BYTES>(
        sequence.keys<Element>(p.dk, p.dk_at, kv) + k0 * p.dk_at.n + d0, p.dk_at.n,
        int(sequence.Nk) - k0, int(p.D) - d0);
    v_tile.template store<THREADS, ALIGNMENT_BYTES>(
        sequence.keys<Element>(p.dv, p.dv_at, kv) + k0 * p.dv_at.n + dv0, p.dv_at.n,
        int(sequence.Nk) - k0, int(p.Dv) - dv0);
    return true;
}

__device__ inline bool first_pass(const Params& p, const KeyBlock& at) {
    if constexpr (SPECIALISED)
        return backward_block_specialised<WARPS_M / 2>(p, at);
    else
        return backward_block<false>(p, at);
}

// Not inlined, so that it costs the first pass no registers.
__device__ __noinline__ void backward_block_nan_safe(const Params& p, int index) {
    backward_block<true>(p, block_of(p, index));
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_dkdv(const __grid_constant__ Params p) {
    overlap_launches();
    for_blocks(p, block_count<BLOCK_K>(p, p.Nk) * p.B * p.Hkv * split_count(p), [&](int index) {
        const KeyBlock at = block_of(p, index);
        if (PACKED && at.block * BLOCK_K >= Sequence(p, at.b).Nk) return;
        const u32 bits = head_flags(p, at.b, at.h);
        if constexpr (PAIR) {
            if (!(bits & KNOWN) && !first_pass(p, at) && threadIdx.x == 0)
                fail_head(p, at.b, at.h);
        } else if constexpr (ONLY_FLAGGED) {
            if (bits & FLAGGED_HEADS) backward_block<true>(p, at);
        } else {
            // The NaN-safe pass has no splits.
            if (bits ? at.split == 0 : !first_pass(p, at))
                backward_block_nan_safe(p, index);
        }
    });
}
