// Backward pass for k and v of float32 as two float16 numbers (splitting.cuh), by mma.sync: one CTA for each block of
// keys, query tiles ascending, the query heads that share the keys one after the other. Each warp has 16 keys. Its
// P and dS stay in registers; all other operands are tiles of planes. backward_float32_dq.cu computes dQ. So only one
// thread adds to an element, or splits of the queries add in a tree: the order of the sums is fixed.
//
// A head fails as in forward_float32_sm90.cu. Generic kernels compute it again.
#include "key_block.cuh"
#include "long_sums.cuh"
#include "split_backward.cuh"

constexpr int QT = BLOCK_Q / 8, DT = HEAD_DIM / 8, VT = VALUE_DIM / 8;
static_assert(BLOCK_K == 16 * WARPS_M && WARPS_N == 1 && TILE_ROWS % BLOCK_Q == 0 && !PAIR);

// Where dk or dv of the rows of a warp goes. Addresses are computed again, so that registers need not keep them.
__device__ inline ResultRows results_of(const Params& p, void* target, const Rows& place, i64 columns) {
    int index = int(blockIdx.x);
    hide(index);
    const KeyBlock at = block_of(p, index);
    const Sequence sequence(p, at.b);
    const int row = at.block * BLOCK_K + threadIdx.x / WARP * 16;
    return {sequence.keys<Element>(target, place, at.h) + row * place.n, place.n, int(sequence.Nk) - row,
            int(columns)};
}

// Compute dK and dV of a block of keys, or of a split of its queries: the last split to finish stores them. Returns
// false if they are not good.
__device__ inline bool backward_block(const Params& p, const KeyBlock& at) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(16) Accum lse_log2[STAGES][BLOCK_Q], deltas[STAGES][BLOCK_Q];
    const KeyTile k_tile{memory};
    const ValueTile v_tile{k_tile.base + KeyTile::BYTES};
    char* const stages = v_tile.base + ValueTile::BYTES;
    auto q_tile = [&](int stage) { return QueryTile(stages + stage * (QueryTile::BYTES + DoutTile::BYTES)); };
    auto dout_tile = [&](int stage) { return DoutTile(q_tile(stage).base + QueryTile::BYTES); };
    const WarpBias<true, 1, QT> bias(q_tile(STAGES).base);

    const int k0 = at.block * BLOCK_K, kv = at.h, row0 = threadIdx.x / WARP * 16;  // this warp's first key
    const Sequence sequence(p, at.b);
    const SlidingWindow window(p, sequence);
    const HeadPlanes keys = HeadPlanes::of_keys(p, sequence, kv);
    keys.load(k_tile, p.k_planes, k0, window.length);
    keys.load(v_tile, p.v_planes, k0, window.length);
    copy_commit();
    copy_wait<0>();
    __syncthreads();  // k and v have landed
    const FirstOperand<KeyTile, HEAD_DIM> k[] = {{k_tile, row0}};
    const FirstOperand<ValueTile, VALUE_DIM> v[] = {{v_tile, row0}};
    const bool any = k0 + row0 < window.length;  // the factors end with the keys
    const float k_inverse = any ? keys.inverse(p.k_factors, k0 + row0) : 0;
    const float v_inverse = any ? keys.inverse(p.v_factors, k0 + row0) : 0;
    // With several copies of dbias each batch entry has its own. Then BiasElement is Accum.
    BiasElement* const dbias = static_cast<BiasElement*>(p.dbias_copies > 1 ? p.dbias_sums : p.dbias);

    Fragment<Accum, 1, DT> dk;
    Fragment<Accum, 1, VT> dv;
    float farthest = 0;  // the largest inverse factor of a tile of queries
    LongGradient<BLOCK_Q> long_sums;
    dk.clear();
    dv.clear();
    auto rows_of_dk = [&] { return results_of(p, p.dk, p.dk_at, p.D); };
    auto rows_of_dv = [&] { return results_of(p, p.dv, p.dv_at, p.Dv); };
    const QuerySplit<SPLIT_Q> split(p, at.split);
    const Range queries = split.clip(p, window.query_range(k0, k0 + BLOCK_K));
#pragma unroll 1
    for (int g = split.begin(); g < split.end(p); ++g) {
        const Head head(p, at.b, kv * int(p.group) + g);
        const HeadPlanes rows = HeadPlanes::of_queries(p, sequence, head.h);
        TileIterator tiles(queries.lo / BLOCK_Q, (queries.hi + BLOCK_Q - 1) / BLOCK_Q, [&](int n) {
            return head.attn_mask.kind(n * BLOCK_Q, n * BLOCK_Q + BLOCK_Q, k0, k0 + BLOCK_K);
        });
        auto load = [&](int stage) {
            const int q0 = tiles.tile * BLOCK_Q;
            u32 thread = threadIdx.x;
            hide(thread);  // so that addresses are not kept in registers
            rows.load(q_tile(stage), p.q_planes, q0, int(sequence.Nq), thread);
            rows.load(dout_tile(stage), p.dout_planes, q0, int(sequence.Nq), thread);
            copy_row<THREADS>(lse_log2[stage], head.lse_log2() + q0);
            copy_row<THREADS>(deltas[stage], head.delta() + q0);
            copy_commit();
        };
        auto load_bias = [&] { bias.load(head.score_mod, tiles.tile * BLOCK_Q, k0 + row0); };
        __syncthreads();  // all warps are done with the last tile of the previous head
        int stage = 0;
        if (!tiles.done()) load(0), load_bias();
#pragma unroll 1
        while (!tiles.done()) {
            const int q0 = tiles.tile * BLOCK_Q, kind = tiles.kind, now = stage;
            const QueryTile q = q_tile(now);
            const DoutTile dout = dout_tile(now);
            copy_wait<0>();
            __syncthreads();  // q and dO have landed, and all warps are done with the previous tile
            tiles.next();
            if (STAGES > 1 && !tiles.done()) load(stage ^= 1);

            if constexpr (!SPLIT_Q)  // a split has few tiles, and no results of its own
                long_sums.begin_tiles(1, [&](auto add) { add(dk, rows_of_dk()), add(dv, rows_of_dv()); });
            const float q_inverse = rows.inverse(p.q_factors, q0), dout_inverse = rows.inverse(p.dout_factors, q0);
            farthest = maximum_or_nan(farthest, q_inverse);
            TileGradient<true, 1, QT> tile(k0 + row0, q0);
            auto query = [](int n, int e) { return 8 * n + Lane().column(e); };
            tile.load_mask(head.attn_mask);
            split_multiply<IN_TURN>(tile.p, k, q, {{q_inverse * k_inverse, q_inverse * k_inverse}});
            tile.recompute_p(
                head.score_mod, bias, head.attn_mask, head.dropout, kind, false,
                [](int, int, int) { return Accum(0); },
                [&](int, int n, int e) { return lse_log2[now][query(n, e)]; });
            split_multiply<IN_TURN>(tile.ds, v, dout, {{dout_inverse * v_inverse, dout_inverse * v_inverse}});
            tile.compute_ds(Accum(p.dropout_scale), [&](int, int n, int e) { return deltas[now][query(n, e)]; });
            if constexpr (WRITE_DBIAS)
                bias.write(dbias + head.row(0) * p.Nk, head.score_mod, q0, k0 + row0, tile.ds);
            if (!tiles.done()) load_bias();
            tile.apply_dsoftcap();
            tile.zero_dropped();
            add_split_rows(dv, tile.p, {SPLIT_P, SPLIT_P}, dout, dout_inverse);
            add_split_gradient(dk, tile.ds, q, q_inverse);
            if constexpr (STAGES == 1) {
                __syncthreads();  // all warps are done with q and dO
                if (!tiles.done()) load(0);
            }
        }
    }
    bool good = keeps_digits(p, k_inverse, farthest);
    if constexpr (SPLIT_Q)
        if (!join_splits(p, at, dk, dv)) return !__syncthreads_or(!good);
    long_sums.end(dk, rows_of_dk());
    long_sums.end(dv, rows_of_dv());
    dv.scale(dv_scale(p));
    dk.scale(Accum(p.scale));
    good = good && dk.all_finite() && dv.all_finite();
    if (__syncthreads_or(!good)) return false;
    rows_of_dk().store(dk);
    rows_of_dv().store(dv);
    return true;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_float32(const __grid_constant__ Params p) {
    overlap_launches();
    const KeyBlock at = block_of(p, int(blockIdx.x));
    if (PACKED && at.block * BLOCK_K >= Sequence(p, at.b).Nk) return;
    if (!(head_flags(p, at.b, at.h) & KNOWN) && !backward_block(p, at) && threadIdx.x == 0)
        fail_head(p, at.b, at.h);
}
