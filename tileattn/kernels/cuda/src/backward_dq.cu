// Backward pass for q: one CTA for each block of queries, key tiles ascending. dQ stays in registers, so it
// is bitwise reproducible. If other kernels add dQ in memory, this one computes only flagged heads.
// Non-finite values are handled as in backward_dkdv.cu.
#include "gradient.cuh"
#include "pair.cuh"
#include "tile_scheduler.cuh"

constexpr int MT = BLOCK_Q / (16 * WARPS_M);
constexpr int NT = BLOCK_K / 8;
constexpr int DT = HEAD_COLUMNS / 8;
static_assert(WARPS_N == 1, "a warp holds whole rows of scores");

using QueryTile = Tile<Element, BLOCK_Q, HEAD_COLUMNS>;
using DoutTile = Tile<Element, BLOCK_Q, VALUE_COLUMNS>;
using KeyTile = Tile<Element, BLOCK_K, HEAD_COLUMNS>;
using ValueTile = Tile<Element, BLOCK_K, VALUE_COLUMNS>;
using ScoreTile = Tile<Element, BLOCK_Q, BLOCK_K>;
using NonFiniteTable = NonFinite<Element, BLOCK_K, HEAD_COLUMNS>;
static_assert(NonFiniteTable::BYTES <= ValueTile::BYTES, "the table takes the v tile");

// Compute dQ of a block of queries. Returns false, and stores nothing, if it is not finite.
template <bool NAN_SAFE>
__device__ inline bool backward_dq_block(const Params& p, int q0, int b, int h) {
    extern __shared__ __align__(1024) char memory[];
    const QueryTile q_tile{memory};
    const DoutTile dout_tile{q_tile.base + QueryTile::BYTES};
    char* const stages = dout_tile.base + DoutTile::BYTES;
    auto k_tile = [&](int stage) {
        return KeyTile(stages + stage * (KeyTile::BYTES + ValueTile::BYTES));
    };
    auto v_tile = [&](int stage) { return ValueTile(k_tile(stage).base + KeyTile::BYTES); };
    // The parts of S and of dP that the other CTA sends.
    const ScoreTile peer_s(k_tile(STAGES).base), peer_dp(peer_s.base + PAIR * ScoreTile::BYTES);
    const WarpBias<false, MT, NT> bias(peer_dp.base + PAIR * ScoreTile::BYTES);

    const Head head(p, b, h);
    const int row0 = threadIdx.x / WARP * MT * 16, rows = int(head.Nq()) - q0;
    const int d0 = own_half() * HEAD_COLUMNS, dv0 = own_half() * VALUE_COLUMNS;
    const Lane lane;

    const Range keys = head.attn_mask.window.key_range(q0, min(q0 + BLOCK_Q, int(head.Nq())));
    auto load_keys = [&](int k0, int stage) {
        k_tile(stage).template load<THREADS, ALIGNMENT_BYTES>(head.k + k0 * p.k_at.n + d0, p.k_at.n,
                                                              keys.hi - k0, int(p.D) - d0);
        v_tile(stage).template load<THREADS, ALIGNMENT_BYTES>(
            head.v + k0 * p.v_at.n + dv0, p.v_at.n, keys.hi - k0, int(p.Dv) - dv0);
        copy_commit();
    };
    auto load_bias = [&](int k0) { bias.load(head.score_mod, q0 + row0, k0); };
    q_tile.template load<THREADS, ALIGNMENT_BYTES>(head.q + q0 * p.q_at.n + d0, p.q_at.n, rows,
                                                   int(p.D) - d0);
    dout_tile.template load<THREADS, ALIGNMENT_BYTES>(head.dout + q0 * p.dout_at.n + dv0,
                                                      p.dout_at.n, rows, int(p.Dv) - dv0);
    copy_commit();
    __shared__ Mail::Barriers barriers[PAIR ? 2 : 1];
    Mail s_mail(barriers[0]), dp_mail(barriers[PAIR]);
    if constexpr (PAIR) arrive_at_peer(), wait_for_peer(), s_mail.release(), dp_mail.release();
    Accum lse_log2[MT][2], delta[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = q0 + row0 + 16 * m + lane.row(2 * half);
            lse_log2[m][half] = head.lse_log2()[i];
            delta[m][half] = head.delta()[i];
        }
    Fragment<Accum, MT, DT> dq;
    TileIterator tiles(keys.lo / BLOCK_K, (keys.hi + BLOCK_K - 1) / BLOCK_K, [&](int tile) {
        return head.attn_mask.kind(q0, q0 + BLOCK_Q, tile * BLOCK_K, tile * BLOCK_K + BLOCK_K);
    });
    dq.clear();
    int stage = 0;
    if (!tiles.done()) {
        load_keys(tiles.tile * BLOCK_K, 0);
        load_bias(tiles.tile * BLOCK_K);
    }
    while (!tiles.done()) {
        const int k0 = tiles.tile * BLOCK_K, kind = tiles.kind;
        const KeyTile k = k_tile(stage);
        const ValueTile v = v_tile(stage);
        copy_wait<0>();
        __syncthreads();  // k and v have landed, and all warps are done with the previous tile
        tiles.next();
        if (STAGES > 1 && !tiles.done()) load_keys(tiles.tile * BLOCK_K, stage ^= 1);

        TileGradient<false, MT, NT, NAN_SAFE> tile(q0 + row0, k0);
        tile.load_mask(head.attn_mask);
        multiply<HEAD_COLUMNS, STEPS<NAN_SAFE, HEAD_COLUMNS>, false, NAN_SAFE>(tile.p, q_tile, row0,
                                                                               k, 0);
        auto recompute_p = [&] {
            tile.recompute_p(
                head.score_mod, bias, head.attn_mask, head.dropout, kind,
                NAN_SAFE && head.needs_max_first(),
                [&](int m, int, int e) { return head.row_max()[q0 + row0 + 16 * m + lane.row(e)]; },
                [&](int m, int, int e) { return lse_log2[m][e / 2]; });
        };
        if constexpr (PAIR) {
            s_mail.send(peer_s, tile.p, row0, 0);
        } else {
            recompute_p();
        }
        multiply<VALUE_COLUMNS, STEPS<NAN_SAFE, VALUE_COLUMNS>, false, NAN_SAFE>(tile.ds, dout_tile,
                                                                                 row0, v, 0);
        if constexpr (PAIR) {
            dp_mail.send(peer_dp, tile.ds, row0, 0);
            s_mail.add(peer_s, tile.p, row0, 0);
            s_mail.release();
            recompute_p();
            dp_mail.add(peer_dp, tile.ds, row0, 0);
            dp_mail.release();
        }
        if (!tiles.done()) load_bias(tiles.tile * BLOCK_K);
        tile.compute_ds(Accum(p.dropout_scale), [&](int m, int, int e) { return delta[m][e / 2]; });
        tile.apply_dsoftcap();
        // As in backward_dkdv.cu. After this barrier all warps are done with v and the uncleaned k.
        if (NAN_SAFE && (HAS_MASK || HAS_ANY_SCORES || kind == PARTIAL) &&
            __syncthreads_or(tile.any_masked())) {
            const NonFiniteTable table{v.address};
            const bool bad =
                __syncthreads_or(table.clean<WARPS_M, HAS_SCORE_GRAD>(k, threadIdx.x / WARP));
            if (HAS_SCORE_GRAD && bad) {
                const auto attended = tile.attended();
                add_non_finite(dq, table, 0,
                               [&](int m, int half, int w) { return attended.word(m, half, w); });
            }
        }
        const Accum excess = NAN_SAFE ? tile.excess() : Accum(1);
        if (excess > 1) tile.ds.scale(1 / excess), dq.scale(1 / excess);
        multiply(dq, tile.ds, k, 0);
        if (excess > 1) dq.scale(excess);
        if (STAGES == 1) {
            __syncthreads();  // all warps are done with k
            if (!tiles.done()) load_keys(tiles.tile * BLOCK_K, 0);
        }
    }
    copy_wait<0>();
    if constexpr (PAIR) arrive_at_peer(), wait_for_peer();  // no store to either CTA is in flight
    // After this barrier all warps are done with q.
    if (__syncthreads_or(!NAN_SAFE && !dq.all_finite())) return false;

    dq.scale(Accum(p.scale));
    store_fragment(q_tile, dq, row0, 0);
    __syncthreads();
    q_tile.template store<THREADS, ALIGNMENT_BYTES>(
        head.sequence.queries<Element>(p.dq, p.dq_at, head.h) + q0 * p.dq_at.n + d0, p.dq_at.n,
        rows, int(p.D) - d0);
    return true;
}

// Not inlined, so that it costs the first pass no registers.
__device__ __noinline__ void backward_dq_block_nan_safe(const Params& p, int q0, int b, int h) {
    backward_dq_block<true>(p, q0, b, h);
}

extern "C" __global__ void CLUSTER __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_dq(const __grid_constant__ Params p) {
    overlap_launches();
    const int q_blocks = block_count<BLOCK_Q>(p, p.Nq), heads = int(p.B * p.Hq);
    for_blocks(p, i64(q_blocks) * heads, [&](int index) {
        const BlockCoord coord(q_blocks, heads, int(p.head_groups), index);
        const int number = p.right < 0 ? coord.block : q_blocks - 1 - coord.block;
        const HeadBlock<BLOCK_Q> at(p, p.query_ends(), int(p.Hq), coord.head, number);
        const int q0 = at.block * BLOCK_Q, b = at.b, h = at.h;
        if (PACKED && q0 >= Sequence(p, b).Nq) return;
        const int kv = h / int(p.group);
        const u32 bits = head_flags(p, b, kv);
        if constexpr (PAIR) {
            if (!(bits & KNOWN) && !backward_dq_block<false>(p, q0, b, h) && threadIdx.x == 0)
                fail_head(p, b, kv);
        } else if constexpr (ONLY_FLAGGED) {
            if (bits & FLAGGED_HEADS) backward_dq_block<true>(p, q0, b, h);
        } else {
            if (bits || !backward_dq_block<false>(p, q0, b, h))
                backward_dq_block_nan_safe(p, q0, b, h);
        }
    });
}
