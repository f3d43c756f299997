// Backward for queries, in a fixed order of its sums: one block of threads for each block of
// queries, key blocks ascending. dq stays on chip. What is not finite is dealt with as in
// backward_keys.cu.
#include "gradient.cuh"
#include "plain.cuh"

constexpr int MT = BLOCK_Q / (16 * WARPS_M);
constexpr int NT = BLOCK_K / 8;
constexpr int DT = HEAD_DIM / 8;
static_assert(WARPS_N == 1, "a warp holds whole rows of scores");

using QueryTile = Tile<Element, BLOCK_Q, HEAD_DIM>;
using OutTile = Tile<Element, BLOCK_Q, VALUE_DIM>;
using KeyTile = Tile<Element, BLOCK_K, HEAD_DIM>;
using ValueTile = Tile<Element, BLOCK_K, VALUE_DIM>;
using Spoiled = NonFinite<Element, BLOCK_K, HEAD_DIM>;
static_assert(Spoiled::BYTES <= ValueTile::BYTES, "the table takes the place of the values");

// Of one block of queries; whether the gradient is finite.
template <bool CAREFUL>
__device__ inline bool differentiate(const Params& p, int q0, int b, int h) {
    extern __shared__ __align__(1024) char memory[];
    const QueryTile q_tile{memory};
    const OutTile dout_tile{q_tile.base + QueryTile::BYTES};
    char* const stages = dout_tile.base + OutTile::BYTES;
    auto k_tile = [&](int stage) {
        return KeyTile(stages + stage * (KeyTile::BYTES + ValueTile::BYTES));
    };
    auto v_tile = [&](int stage) { return ValueTile(k_tile(stage).base + KeyTile::BYTES); };
    const WarpBias<false, MT, NT> bias(k_tile(STAGES).base);

    const Head head(p, b, h);
    const int row0 = threadIdx.x / WARP * MT * 16, rows = int(p.Nq) - q0;
    const Lane lane;

    const Range keys = head.sight.band.keys_of(q0, min(q0 + BLOCK_Q, int(p.Nq)));
    auto load_keys = [&](int k0, int stage) {
        k_tile(stage).template load<THREADS, VECTOR>(head.k + k0 * p.k_at.n, p.k_at.n,
                                                     keys.hi - k0, int(p.D));
        v_tile(stage).template load<THREADS, VECTOR>(head.v + k0 * p.v_at.n, p.v_at.n,
                                                     keys.hi - k0, int(p.Dv));
        copy_commit();
    };
    auto load_bias = [&](int k0) { bias.load(head.terms, q0 + row0, k0); };
    q_tile.template load<THREADS, VECTOR>(head.q + q0 * p.q_at.n, p.q_at.n, rows, int(p.D));
    dout_tile.template load<THREADS, VECTOR>(head.dout + q0 * p.dout_at.n, p.dout_at.n, rows,
                                             int(p.Dv));
    copy_commit();
    Sum shift[MT][2], delta[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = q0 + row0 + 16 * m + lane.row(2 * half);
            shift[m][half] = head.shift()[i];
            delta[m][half] = head.delta()[i];
        }
    Fragment<Sum, MT, DT> dq;
    Visits visit(keys.lo / BLOCK_K, (keys.hi + BLOCK_K - 1) / BLOCK_K, [&](int tile) {
        return head.sight.kind(q0, q0 + BLOCK_Q, tile * BLOCK_K, tile * BLOCK_K + BLOCK_K);
    });
    dq.clear();
    int stage = 0;
    if (!visit.done()) {
        load_keys(visit.tile * BLOCK_K, 0);
        load_bias(visit.tile * BLOCK_K);
    }
    while (!visit.done()) {
        const int k0 = visit.tile * BLOCK_K, kind = visit.kind;
        const KeyTile k = k_tile(stage);
        const ValueTile v = v_tile(stage);
        copy_wait<0>();
        __syncthreads();  // this visit's keys are here, and everybody is done with the last
        visit.next();
        if (STAGES > 1 && !visit.done()) load_keys(visit.tile * BLOCK_K, stage ^= 1);

        TileGradient<false, MT, NT, CAREFUL> tile(q0 + row0, k0);
        tile.look(head.sight);
        multiply<HEAD_DIM, STEPS<CAREFUL, HEAD_DIM>, false, CAREFUL>(tile.p, q_tile, row0, k, 0);
        tile.probabilities(
            head.terms, bias, head.sight, head.dropout, kind, CAREFUL && head.is_large(),
            [&](int m, int, int e) {
                return head.row_max()[q0 + row0 + 16 * m + lane.row(e)];
            },
            [&](int m, int, int e) { return shift[m][e / 2]; });
        if (!visit.done()) load_bias(visit.tile * BLOCK_K);
        multiply<VALUE_DIM, STEPS<CAREFUL, VALUE_DIM>, false, CAREFUL>(
            tile.ds, dout_tile, row0, v, 0);
        tile.at_scores(Sum(p.gain), [&](int m, int, int e) { return delta[m][e / 2]; });
        tile.at_products();
        // As in backward_keys.cu.
        // Behind this barrier everybody is done with keys and values as they were.
        if (CAREFUL && (HAS_MASK || HAS_BIAS || kind == PARTIAL) &&
            __syncthreads_or(tile.hides_some())) {
            const Spoiled table{v.address};
            const bool bad = __syncthreads_or(
                table.clean<WARPS_M, HAS_SOFTCAP>(k, threadIdx.x / WARP));
            if (HAS_SOFTCAP && bad) {
                const auto pairs = tile.attended();
                inject(dq, table, 0,
                       [&](int m, int half, int w) { return pairs.word(m, half, w); });
            }
        }
        const Sum excess = CAREFUL ? tile.excess() : Sum(1);
        if (excess > 1) tile.ds.scale(1 / excess), dq.scale(1 / excess);
        multiply(dq, tile.ds, k, 0);
        if (excess > 1) dq.scale(excess);
        if (STAGES == 1) {
            __syncthreads();  // everybody is done with the keys
            if (!visit.done()) load_keys(visit.tile * BLOCK_K, 0);
        }
    }
    copy_wait<0>();
    // By now everybody is done with the queries.
    if (__syncthreads_or(!CAREFUL && !dq.all_finite())) return false;

    dq.scale(Sum(p.scale));
    store_fragment(q_tile, dq, row0, 0);
    __syncthreads();
    q_tile.template store<THREADS, VECTOR>(
        rows_of<Element>(p.dq, p.dq_at, head.b, head.h) + q0 * p.dq_at.n, p.dq_at.n, rows,
        int(p.D));
    return true;
}

// Not inlined, so that it costs the first pass no registers.
__device__ __noinline__ void differentiate_carefully(const Params& p, int q0, int b, int h) {
    differentiate<true>(p, q0, b, h);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    backward_queries(const __grid_constant__ Params p) {
    const int q_blocks = int((p.Nq + BLOCK_Q - 1) / BLOCK_Q), heads = int(p.B * p.Hq);
    for_blocks(p, i64(q_blocks) * heads, [&](int index) {
        const Turn turn(q_blocks, heads, int(p.parts), index);
        const int q0 = (p.right < 0 ? turn.block : q_blocks - 1 - turn.block) * BLOCK_Q;
        const int b = turn.head / int(p.Hq), h = turn.head % int(p.Hq);
        const u32 bits = special(p, b, h / int(p.group));
        if constexpr (REPAIRS) {
            if (bits & REPAIRS) differentiate<true>(p, q0, b, h);
        } else {
            if (bits || !differentiate<false>(p, q0, b, h)) differentiate_carefully(p, q0, b, h);
        }
    });
}
