// Layer 3. Backward pass of a block of keys by a pair of CTAs in float64, with two kinds of warps:
//
//     P warps     load q and dO;  S, P;    dV += P^T dO
//     dS warps                    dP, dS;  dK += dS^T q,  dQ += dS k
//
// Shared memory supplies 128 bytes a clock, and mma in float64 can consume as many. If half of the warps
// compute S, dP, dV or dK, each has twice as many atoms, and loads a quarter fewer operands for each atom.
// The exponentials and loads of the P warps overlap with GEMMs of the dS warps. dQ overlaps with S of the
// next tile.
#pragma once

#include "key_block.cuh"

// Only P warps would know the derivatives of the scores and the dropped pairs, which dS needs. A bias and
// its gradient pass through the memory of one warp. All warps search a block mask together, but the two
// kinds of warps can be at different tiles.
constexpr bool SPECIALISED = PAIR && STAGES == 1 && WARPS_M == 4 && WARPS_N == 2 &&
                             HEAD_DIM == VALUE_DIM && !HAS_SCORE_GRAD && !HAS_DROPOUT &&
                             !HAS_BIAS && !HAS_BLOCK_MASK && !HAS_MASK_MOD && !SPLIT_Q && !WRITE_DQ;

// Compute dK and dV of a block of keys, as backward_block<false> does. The warps of a kind are a grid of
// HALF_M x WARPS_N. This is a template so that other keys do not compile it.
template <int HALF_M>
__device__ inline bool backward_block_specialised(const Params& p, const KeyBlock& at) {
    constexpr int HALF = HALF_M * WARPS_N, HALF_THREADS = WARP * HALF;
    constexpr int MT = BLOCK_K / (16 * HALF_M);  // keys of a warp, in 16-row tiles
    constexpr int QT = BLOCK_Q / (8 * WARPS_N);  // queries of a warp's scores, in 8-column tiles
    using SumWarpTile = WarpTile<BLOCK_K, HEAD_COLUMNS, WARPS_N, HALF>;
    // A warp computes half of 128 columns of dQ at a time: beside dK, 32 x 32 sums would spill.
    constexpr int DQ_COLUMNS = HEAD_COLUMNS % 128 == 0 ? HEAD_COLUMNS / 2 : HEAD_COLUMNS;
    using DqWarpTile = WarpTile<BLOCK_Q, DQ_COLUMNS, across<BLOCK_Q, DQ_COLUMNS, HALF>(), HALF>;
    static_assert(SumWarpTile::ALL, "all warps have a part");
    // Named barriers. Id 0 is __syncthreads.
    constexpr int P_WARPS = 1, DS_WARPS = 2, P_STORED = 3, RELEASED = 4;

    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(16) Accum lse_log2[BLOCK_Q], deltas[BLOCK_Q];
    __shared__ Mail::Barriers barriers;
    __shared__ u64 landed;
    const KeyTile k_tile{memory}, v_tile{k_tile.base + KeyTile::BYTES};
    const ScoreTile p_tile{v_tile.base + KeyTile::BYTES}, ds_tile{p_tile.base + ScoreTile::BYTES};
    const QueryTile q_tile{ds_tile.base + ScoreTile::BYTES};
    const QueryTile dout_tile{q_tile.base + QueryTile::BYTES};

    const int number = int(uniform(threadIdx.x / WARP));
    const bool has_p = number < HALF;
    // P warps:  S = keys rows^T, dV += score_tile columns. dS warps: dP and dK.
    const KeyTile keys(has_p ? k_tile.base : v_tile.base);
    const QueryTile rows(has_p ? q_tile.base : dout_tile.base);
    const QueryTile columns(has_p ? dout_tile.base : q_tile.base);
    const ScoreTile score_tile(has_p ? p_tile.base : ds_tile.base);

    const int k0 = at.block * BLOCK_K, b = at.b, kv = at.h;
    const int d0 = own_half() * HEAD_COLUMNS;
    const WarpBias<true, MT, QT> no_bias(memory);
    const Lane lane;
    const Sequence sequence(p, b);
    const SlidingWindow window(p, sequence);
    const Range queries = window.query_range(k0, k0 + BLOCK_K);
    load_key_block(p, sequence, window, kv, k0, k_tile, d0, v_tile, d0);
    Fragment<Accum, SumWarpTile::MT, SumWarpTile::NT> sums;  // dV, or dK
    sums.clear();
    const Barrier dout_landed{shared_address(&landed)};  // q has then landed, too
    u32 phase = 0;
    if (threadIdx.x == 0) dout_landed.init(HALF_THREADS);
    Mail mail(barriers);
    arrive_at_peer(), wait_for_peer();
    copy_wait<0>();
    __syncthreads();  // k and v have landed, and dout_landed is initialised
    for (int g = 0; g < int(p.group); ++g) {
        const Head head(p, b, kv * int(p.group) + g);
        TileIterator tiles(queries.lo / BLOCK_Q, (queries.hi + BLOCK_Q - 1) / BLOCK_Q, [&](int n) {
            return head.attn_mask.kind(n * BLOCK_Q, n * BLOCK_Q + BLOCK_Q, k0, k0 + BLOCK_K);
        });
        for (; !tiles.done(); tiles.next()) {
            const int q0 = tiles.tile * BLOCK_Q, length = int(sequence.Nq) - q0;
            if (has_p) {
                // All readers of the previous q, lse, dO and delta have arrived at RELEASED. cp.async writes
                // through the generic proxy, like these reads, so no proxy fence is needed.
                q_tile.template load<HALF_THREADS, ALIGNMENT_BYTES>(
                    head.q + q0 * p.q_at.n + d0, p.q_at.n, length, int(p.D) - d0);
                copy_row<HALF_THREADS>(lse_log2, head.lse_log2() + q0);
                copy_commit();
                dout_tile.template load<HALF_THREADS, ALIGNMENT_BYTES>(
                    head.dout + q0 * p.dout_at.n + d0, p.dout_at.n, length, int(p.Dv) - d0);
                copy_row<HALF_THREADS>(deltas, head.delta() + q0);
                copy_commit();
                dout_landed.arrive_after_copies();
                copy_wait<1>();
                named_barrier_sync<HALF_THREADS>(P_WARPS);  // q has landed
            } else {
                // Only dS warps read dS, and all have finished dK and dQ of the previous tile.
                named_barrier_sync<HALF_THREADS>(DS_WARPS);
                dout_landed.wait(phase);
            }
            // The peer's part of S overwrites P, and its part of dP overwrites dS. The readers of P have
            // arrived at RELEASED, the readers of dS at DS_WARPS.
            mail.release();

            int warp = number % HALF;
            hide(warp);  // keep no addresses of a GEMM during the others
            const int row0 = warp / WARPS_N * MT * 16;  // this warp's first score
            const int column0 = warp % WARPS_N * QT * 8;
            auto query = [&](int n, int e) { return column0 + 8 * n + lane.column(e); };
            TileGradient<true, MT, QT> tile(k0 + row0, q0 + column0);
            if (has_p) tile.load_mask(head.attn_mask);
            Fragment<Accum, MT, QT> scores;  // S, or dP
            scores.clear();
            multiply<HEAD_COLUMNS, 2>(scores, keys, row0, rows, column0);
            mail.send(score_tile, scores, row0, column0);
            mail.add(score_tile, scores, row0, column0);
            if (has_p) {
                static_cast<Fragment<Accum, MT, QT>&>(tile.p) = scores;
                tile.recompute_p(
                    head.score_mod, no_bias, head.attn_mask, head.dropout, tiles.kind, false,
                    [](int, int, int) { return Accum(0); },
                    [&](int, int n, int e) { return lse_log2[query(n, e)]; });
                // Each lane overwrites the peer's part of S that it has read itself.
                store_fragment(p_tile, tile.p, row0, column0);
                named_barrier_sync<HALF_THREADS>(P_WARPS);  // P of all queries is stored, for dV
                named_barrier_arrive<THREADS>(P_STORED);
                dout_landed.wait(phase);
            } else {
                static_cast<Fragment<Accum, MT, QT>&>(tile.ds) = scores;
                named_barrier_sync<THREADS>(P_STORED);
                Mail::for_neighbours<ScoreTile>(tile.p, row0, column0, [&](int at, Accum* x) {
                    const auto two = p_tile.pair(at);
                    x[0] = two.x, x[1] = two.y;
                });
                tile.compute_ds(Accum(p.dropout_scale),
                                [&](int, int n, int e) { return deltas[query(n, e)]; });
                // Each lane overwrites the peer's part of dP that it has read itself.
                store_fragment(ds_tile, tile.ds, row0, column0);
                named_barrier_sync<HALF_THREADS>(DS_WARPS);  // dS of all queries is stored
            }
            phase ^= 1;
            hide(warp);
            const SumWarpTile of_sums(warp);
            multiply_rows<false, BLOCK_Q, 1>(sums, score_tile, of_sums.row, columns,
                                             of_sums.column);
            // This warp no longer reads q, lse, dO, delta or P: a P warp has finished P and dV, and a dS warp
            // dS and dK. The P warps wait for all warps, and then load the next tile. The dS warps do not
            // wait, since dQ reads only dS and k.
            if (has_p) {
                named_barrier_sync<THREADS>(RELEASED);
                continue;
            }
            named_barrier_arrive<THREADS>(RELEASED);
            // If dQ is not finite, it stays so in memory, and backward_dq_convert flags the head.
            if constexpr (ADD_DQ) {
                hide(warp);
                const DqWarpTile of_dq(warp);
                Accum* const to = static_cast<Accum*>(p.dq_accum) + head.row(q0) * HEAD_DIM + d0;
#pragma unroll 1
                for (int from = 0; from < HEAD_COLUMNS; from += DQ_COLUMNS) {
                    Fragment<Accum, DqWarpTile::MT, DqWarpTile::NT> dq;
                    dq.clear();
                    multiply_rows<true, BLOCK_K, 2>(dq, ds_tile, of_dq.row, k_tile,
                                                    from + of_dq.column);
                    if (of_dq.any())
                        add_rows(to, HEAD_DIM, dq, of_dq.row, from + of_dq.column, length);
                }
            }
        }
    }
    arrive_at_peer(), wait_for_peer();  // no store to either CTA is in flight
    // After this barrier all warps are done with k and v. S, dP and dQ of the last tile were the last reads.
    if (__syncthreads_or(!sums.all_finite())) return false;

    const SumWarpTile of_sums(number % HALF);
    sums.scale(has_p ? dv_scale(p) : Accum(p.scale));
    store_fragment(KeyTile(has_p ? v_tile.base : k_tile.base), sums, of_sums.row, of_sums.column);
    __syncthreads();  // dK and dV of all warps are stored
    k_tile.template store<THREADS, ALIGNMENT_BYTES>(
        sequence.keys<Element>(p.dk, p.dk_at, kv) + k0 * p.dk_at.n + d0, p.dk_at.n,
        int(sequence.Nk) - k0, int(p.D) - d0);
    v_tile.template store<THREADS, ALIGNMENT_BYTES>(
        sequence.keys<Element>(p.dv, p.dv_at, kv) + k0 * p.dv_at.n + d0, p.dv_at.n,
        int(sequence.Nk) - k0, int(p.Dv) - d0);
    return true;
}
