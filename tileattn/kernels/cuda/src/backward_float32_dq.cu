// Backward pass for q of float32 as two float16 numbers (splitting.cuh), by mma.sync: one CTA for each block of
// queries, key tiles ascending. Each warp has 16 queries. As backward_float32.cu.
//
// A head fails as in forward_float32_sm90.cu. Generic kernels compute it again.
#include "long_sums.cuh"
#include "split_backward.cuh"
#include "tile_scheduler.cuh"

constexpr int NT = BLOCK_K / 8, DT = HEAD_DIM / 8;
static_assert(BLOCK_Q == 16 * WARPS_M && WARPS_N == 1 && TILE_ROWS % BLOCK_K == 0 && !PAIR && !WRITE_DBIAS);

using QueryTile = Tile<Operand, BLOCK_Q, tile_columns(HEAD_COLUMNS)>;
using DoutTile = Tile<Operand, BLOCK_Q, tile_columns(VALUE_COLUMNS)>;
using KeyTile = Tile<Operand, BLOCK_K, tile_columns(HEAD_COLUMNS)>;
using ValueTile = Tile<Operand, BLOCK_K, tile_columns(VALUE_COLUMNS)>;

// Compute dQ of a block of queries. Returns false if it is not good: then dQ has a part of the sums, or nothing.
__device__ inline bool backward_block(const Params& p, int q0, int b, int h) {
    extern __shared__ __align__(1024) char memory[];
    const QueryTile q_tile{memory};
    const DoutTile dout_tile{q_tile.base + QueryTile::BYTES};
    char* const stages = dout_tile.base + DoutTile::BYTES;
    auto k_tile = [&](int stage) { return KeyTile(stages + stage * (KeyTile::BYTES + ValueTile::BYTES)); };
    auto v_tile = [&](int stage) { return ValueTile(k_tile(stage).base + KeyTile::BYTES); };
    const WarpBias<false, 1, NT> bias(k_tile(STAGES).base);

    const Head head(p, b, h);
    const int row0 = threadIdx.x / WARP * 16, Nq = int(head.Nq());  // this warp's first query
    const Lane lane;
    const HeadPlanes rows = HeadPlanes::of_queries(p, head.sequence, h);
    const HeadPlanes keys = HeadPlanes::of_keys(p, head.sequence, h / int(p.group));
    const Range attended = head.attn_mask.window.key_range(q0, min(q0 + BLOCK_Q, Nq));
    TileIterator tiles(attended.lo / BLOCK_K, (attended.hi + BLOCK_K - 1) / BLOCK_K, [&](int tile) {
        return head.attn_mask.kind(q0, q0 + BLOCK_Q, tile * BLOCK_K, tile * BLOCK_K + BLOCK_K);
    });
    auto load = [&](int stage) {
        keys.load(k_tile(stage), p.k_planes, tiles.tile * BLOCK_K, attended.hi);
        keys.load(v_tile(stage), p.v_planes, tiles.tile * BLOCK_K, attended.hi);
        copy_commit();
    };
    auto load_bias = [&] { bias.load(head.score_mod, q0 + row0, tiles.tile * BLOCK_K); };
    rows.load(q_tile, p.q_planes, q0, Nq);
    rows.load(dout_tile, p.dout_planes, q0, Nq);
    copy_commit();
    int stage = 0;
    if (!tiles.done()) load(0), load_bias();
    copy_wait<0>();
    __syncthreads();  // q and dO have landed
    const FirstOperand<QueryTile, HEAD_DIM> q[] = {{q_tile, row0}};
    const FirstOperand<DoutTile, VALUE_DIM> dout[] = {{dout_tile, row0}};
    const bool any = q0 + row0 < Nq;  // the factors end with the queries
    const float q_inverse = any ? rows.inverse(p.q_factors, q0 + row0) : 0;
    const float dout_inverse = any ? rows.inverse(p.dout_factors, q0 + row0) : 0;
    Accum lse_log2[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = q0 + row0 + lane.row(2 * half);
        lse_log2[half] = head.lse_log2()[i], delta[half] = head.delta()[i];
    }

    Fragment<Accum, 1, DT> dq;
    float farthest = 0;  // the largest inverse factor of a tile of keys
    LongGradient<BLOCK_K> long_sums;
    auto rows_of_dq = [&] {
        int row = q0 + row0;
        hide(row);  // so that addresses are not kept in registers
        return ResultRows{head.sequence.queries<Element>(p.dq, p.dq_at, h) + row * p.dq_at.n, p.dq_at.n, Nq - row,
                          int(p.D)};
    };
    dq.clear();
#pragma unroll 1
    while (!tiles.done()) {
        const int k0 = tiles.tile * BLOCK_K, kind = tiles.kind;
        const KeyTile k = k_tile(stage);
        const ValueTile v = v_tile(stage);
        copy_wait<0>();
        __syncthreads();  // k and v have landed, and all warps are done with the previous tile
        tiles.next();
        if (STAGES > 1 && !tiles.done()) load(stage ^= 1);

        long_sums.begin_tiles(1, [&](auto add) { add(dq, rows_of_dq()); });
        const float k_inverse = keys.inverse(p.k_factors, k0), v_inverse = keys.inverse(p.v_factors, k0);
        farthest = maximum_or_nan(farthest, k_inverse);
        TileGradient<false, 1, NT> tile(q0 + row0, k0);
        tile.load_mask(head.attn_mask);
        split_multiply<IN_TURN>(tile.p, q, k, {{q_inverse * k_inverse, q_inverse * k_inverse}});
        tile.recompute_p(
            head.score_mod, bias, head.attn_mask, head.dropout, kind, false, [](int, int, int) { return Accum(0); },
            [&](int, int, int e) { return lse_log2[e / 2]; });
        split_multiply<IN_TURN>(tile.ds, dout, v, {{dout_inverse * v_inverse, dout_inverse * v_inverse}});
        tile.compute_ds(Accum(p.dropout_scale), [&](int, int, int e) { return delta[e / 2]; });
        if (!tiles.done()) load_bias();
        tile.apply_dsoftcap();
        add_split_gradient(dq, tile.ds, k, k_inverse);
        if constexpr (STAGES == 1) {
            __syncthreads();  // all warps are done with k and v
            if (!tiles.done()) load(0);
        }
    }
    long_sums.end(dq, rows_of_dq());
    dq.scale(Accum(p.scale));
    const bool good = dq.all_finite() && keeps_digits(p, q_inverse, farthest);
    if (__syncthreads_or(!good)) return false;
    rows_of_dq().store(dq);
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_float32_dq(const __grid_constant__ Params p) {
    overlap_launches();
    const int q_blocks = block_count<BLOCK_Q>(p, p.Nq);
    const BlockCoord coord(q_blocks, int(p.B * p.Hq), int(p.head_groups), int(blockIdx.x));
    // Longest first: with a causal mask the last queries have most keys.
    const int number = p.right < 0 ? coord.block : q_blocks - 1 - coord.block;
    const HeadBlock<BLOCK_Q> at(p, p.query_ends(), int(p.Hq), coord.head, number);
    const int q0 = at.block * BLOCK_Q, b = at.b, kv = at.h / int(p.group);
    if (PACKED && q0 >= Sequence(p, b).Nq) return;
    if (!(head_flags(p, b, kv) & KNOWN) && !backward_block(p, q0, b, at.h) && threadIdx.x == 0) fail_head(p, b, kv);
}
