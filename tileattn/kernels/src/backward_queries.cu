// Backward for queries, in a fixed order of its sums: one block of threads for each block of
// queries, key blocks ascending. dq stays on chip. What is not finite is dealt with as in
// forward.cu.
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

template <bool CAREFUL>
__device__ void differentiate(const Params& p, int index);

// Not inlined, so that it costs the first pass no registers.
__device__ __noinline__ void differentiate_carefully(const Params& p, int index) {
    differentiate<true>(p, index);
}

template <bool CAREFUL>
__device__ inline void differentiate(const Params& p, int index) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ bool cleaned[BLOCK_K], redo[BLOCK_Q];
    const QueryTile q_tile{memory};
    const OutTile dout_tile{q_tile.base + QueryTile::BYTES};
    char* const stages = dout_tile.base + OutTile::BYTES;
    auto k_tile = [&](int stage) {
        return KeyTile(stages + stage * (KeyTile::BYTES + ValueTile::BYTES));
    };
    auto v_tile = [&](int stage) { return ValueTile(k_tile(stage).base + KeyTile::BYTES); };
    const WarpBias<false, MT, NT> bias(k_tile(STAGES).base);

    const int q_blocks = int((p.Nq + BLOCK_Q - 1) / BLOCK_Q);
    const Turn turn(q_blocks, int(p.B * p.Hq), int(p.parts), index);
    const int q0 = (p.right < 0 ? turn.block : q_blocks - 1 - turn.block) * BLOCK_Q;
    const Head head(p, turn.head / int(p.Hq), turn.head % int(p.Hq));
    if (left_alone(p, head.b, head.h / p.group)) return;
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
    bool found[MT][2] = {};
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

        if constexpr (CAREFUL) clean_tiles<THREADS>(cleaned, k, v);
        TileGradient<false, MT, NT> tile(q0 + row0, k0);
        tile.look(head.sight);
        multiply<HEAD_DIM, STEPS<CAREFUL, HEAD_DIM>>(tile.p, q_tile, row0, k, 0);
        tile.probabilities(
            head.terms, bias, head.sight, head.dropout, kind, CAREFUL && head.is_large(),
            [&](int m, int, int e) {
                return head.row_max()[q0 + row0 + 16 * m + lane.row(e)];
            },
            [&](int m, int, int e) { return shift[m][e / 2]; },
            [&](auto& scores) {
                if constexpr (CAREFUL) scores.find(cleaned, found);
            });
        if (!visit.done()) load_bias(visit.tile * BLOCK_K);
        multiply<VALUE_DIM, STEPS<CAREFUL, VALUE_DIM>>(tile.ds, dout_tile, row0, v, 0);
        tile.at_scores(Sum(p.gain), [&](int m, int, int e) { return delta[m][e / 2]; });
        tile.at_products();
        multiply(dq, tile.ds, k, 0);
        if (STAGES == 1) {
            __syncthreads();  // everybody is done with the keys
            if (!visit.done()) load_keys(visit.tile * BLOCK_K, 0);
        }
    }
    copy_wait<0>();
    if (!CAREFUL && __syncthreads_or(!dq.all_finite())) {
        differentiate_carefully(p, index);
        return;
    }
    __syncthreads();  // everybody is done with the queries

#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < DT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                dq.x[m][n][e] *= Sum(p.scale);
                if (!is_finite(dq.x[m][n][e])) found[m][e / 2] = true;
            }
    store_fragment(q_tile, dq, row0, 0);
    __syncthreads();
    q_tile.template store<THREADS, VECTOR>(
        rows_of<Element>(p.dq, p.dq_at, head.b, head.h) + q0 * p.dq_at.n, p.dq_at.n, rows,
        int(p.D));

    if constexpr (!CAREFUL) return;
    __syncthreads();  // everybody has stored
    for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) redo[i] = false;
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (found[m][half]) redo[row0 + 16 * m + lane.row(2 * half)] = true;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x / WARP; i < BLOCK_Q; i += WARPS_M)
        if (redo[i] && i < rows) query_row(p, head.b, head.h, q0 + i);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    backward_queries(const __grid_constant__ Params p) {
    for_blocks(p, (p.Nq + BLOCK_Q - 1) / BLOCK_Q * p.B * p.Hq,
               [&](int index) { differentiate<false>(p, index); });
}
