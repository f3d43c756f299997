// Before the backward pass, for LARGE_SCORES heads: recompute row maxima and sums, since the logsumexp is
// too coarse. One CTA for each block of queries, key tiles ascending. Scores have the same bits as in
// backward_dq.cu.
#include "renormalise.cuh"
#include "tile_scheduler.cuh"

constexpr int MT = BLOCK_Q / (16 * WARPS_M);
constexpr int NT = BLOCK_K / 8;
static_assert(WARPS_N == 1, "a warp holds whole rows of scores");

using QueryTile = Tile<Element, BLOCK_Q, HEAD_DIM>;
using KeyTile = Tile<Element, BLOCK_K, HEAD_DIM>;

__device__ inline void renormalise(const Params& p, int index) {
    extern __shared__ __align__(1024) char memory[];
    const QueryTile q_tile{memory};
    auto k_tile = [&](int stage) {
        return KeyTile(q_tile.base + QueryTile::BYTES + stage * KeyTile::BYTES);
    };
    const WarpBias<false, MT, NT> bias(k_tile(STAGES).base);

    const int q_blocks = block_count<BLOCK_Q>(p, p.Nq);
    const BlockCoord coord(q_blocks, int(p.B * p.Hq), int(p.head_groups), index);
    const HeadBlock<BLOCK_Q> at(p, p.query_ends(), int(p.Hq), coord.head, coord.block);
    const int q0 = at.block * BLOCK_Q;
    const Head head(p, at.b, at.h);
    if (!head.needs_max_first() || (PACKED && q0 >= head.Nq())) return;
    const RowGroup group(16 * MT);
    const int row0 = group.row0, rows = int(head.Nq()) - q0;

    const Range keys = head.attn_mask.window.key_range(q0, min(q0 + BLOCK_Q, int(head.Nq())));
    auto load_keys = [&](int k0, int stage) {
        k_tile(stage).template load<THREADS, ALIGNMENT_BYTES>(head.k + k0 * p.k_at.n, p.k_at.n,
                                                              keys.hi - k0, int(p.D));
        copy_commit();
    };
    auto load_bias = [&](int k0) { bias.load(head.score_mod, q0 + row0, k0); };
    q_tile.template load<THREADS, ALIGNMENT_BYTES>(head.q + q0 * p.q_at.n, p.q_at.n, rows,
                                                   int(p.D));
    copy_commit();
    RowState<MT> state(true);
    TileIterator tiles(keys.lo / BLOCK_K, (keys.hi + BLOCK_K - 1) / BLOCK_K, [&](int tile) {
        return head.attn_mask.kind(q0, q0 + BLOCK_Q, tile * BLOCK_K, tile * BLOCK_K + BLOCK_K);
    });
    int stage = 0;
    if (!tiles.done()) {
        load_keys(tiles.tile * BLOCK_K, 0);
        load_bias(tiles.tile * BLOCK_K);
    }
    while (!tiles.done()) {
        const int k0 = tiles.tile * BLOCK_K, kind = tiles.kind;
        const KeyTile k = k_tile(stage);
        copy_wait<0>();
        __syncthreads();  // k has landed, and all warps are done with the previous tile
        tiles.next();
        if (STAGES > 1 && !tiles.done()) load_keys(tiles.tile * BLOCK_K, stage ^= 1);

        DenseMask<false, MT, NT> dense;
        if constexpr (HAS_MASK) dense.load(head.attn_mask, q0 + row0, k0);
        Scores<false, MT, NT> s(q0 + row0, k0);
        multiply<HEAD_DIM, HEAD_DIM / 16, false, true>(s, q_tile, row0, k, 0);
        s.apply(head.score_mod, bias, [](int, int, int, Accum, Accum) {});
        if constexpr (HAS_MASK) dense.share();
        if (HAS_MASK || kind == PARTIAL) s.masked_fill(head.attn_mask, dense);
        if (!tiles.done()) load_bias(tiles.tile * BLOCK_K);
        Accum rescale[MT][2];
        state.update(s, head.score_mod.softmax_scale_log2(), group, rescale);
        if (STAGES == 1) {
            __syncthreads();  // all warps are done with k
            if (!tiles.done()) load_keys(tiles.tile * BLOCK_K, 0);
        }
    }
    copy_wait<0>();
    state.reduce_sums(group);
    const Lane lane;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = q0 + row0 + 16 * m + lane.row(2 * half);
            if (lane.t == 0 && i < head.Nq())
                renormalise_row(head, i, state.m[m][half], state.l[m][half] * FORWARD_P_UNIT);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_large_scores(const __grid_constant__ Params p) {
    overlap_launches();
    for_blocks(p, block_count<BLOCK_Q>(p, p.Nq) * p.B * p.Hq,
               [&](int index) { renormalise(p, index); });
}
