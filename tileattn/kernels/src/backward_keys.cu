// Backward for keys and values: one block of threads for each block of keys, query blocks
// ascending, the query heads that share the keys one after the other. dk and dv stay on chip; dq,
// where it is asked for, is added in float32 to global memory. Scores are computed transposed, keys
// in rows. Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 2.
#include "gradient.cuh"
#include "plain.cuh"

constexpr int WARPS = WARPS_M * WARPS_N;
constexpr int MT = BLOCK_K / (16 * WARPS_M);  // keys of a warp, in 16-row tiles
constexpr int QT = BLOCK_Q / (8 * WARPS_N);   // queries of a warp's scores, in 8-column tiles
constexpr int DT = HEAD_DIM / (8 * WARPS_N);  // columns of dk of a warp
constexpr int VT = VALUE_DIM / (8 * WARPS_N);
static_assert(QT % 2 == 0 && DT % 2 == 0 && VT % 2 == 0, "atoms come in pairs of columns");

using KeyTile = Tile<Element, BLOCK_K, HEAD_DIM>;
using ValueTile = Tile<Element, BLOCK_K, VALUE_DIM>;
using QueryTile = Tile<Element, BLOCK_Q, HEAD_DIM>;
using OutTile = Tile<Element, BLOCK_Q, VALUE_DIM>;
using PairTile = Tile<Element, BLOCK_K, BLOCK_Q>;

// How the warps share dq: as many as possible along its columns.
constexpr int dq_warps_n() {
    for (int n = WARPS; n > 1; n /= 2)
        if (HEAD_DIM % (16 * n) == 0 && BLOCK_Q % (16 * WARPS / n) == 0) return n;
    return 1;
}
constexpr int DQ_N = dq_warps_n(), DQ_M = WARPS / DQ_N;
constexpr int DQ_MT = ADD_DQ ? BLOCK_Q / (16 * DQ_M) : 1, DQ_NT = HEAD_DIM / (8 * DQ_N);
static_assert(!ADD_DQ || BLOCK_Q % (16 * DQ_M) == 0, "too few queries for so many warps");

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    backward_keys(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ __align__(16) Sum shifts[STAGES][BLOCK_Q], deltas[STAGES][BLOCK_Q];
    __shared__ bool bad[BLOCK_K];
    const KeyTile k_tile{memory};
    const ValueTile v_tile{k_tile.base + KeyTile::BYTES};
    const PairTile p_tile{v_tile.base + ValueTile::BYTES};
    const PairTile ds_tile{p_tile.base + PairTile::BYTES};
    char* const stages = ds_tile.base + PairTile::BYTES;
    auto q_tile = [&](int stage) {
        return QueryTile(stages + stage * (QueryTile::BYTES + OutTile::BYTES));
    };
    auto dout_tile = [&](int stage) { return OutTile(q_tile(stage).base + QueryTile::BYTES); };

    const int k_blocks = int((p.Nk + BLOCK_K - 1) / BLOCK_K);
    const int k0 = blockIdx.x % k_blocks * BLOCK_K, rest = blockIdx.x / k_blocks;
    const int b = rest / int(p.Hkv), kv = rest % int(p.Hkv);
    const int warp = threadIdx.x / WARP, warp_m = warp / WARPS_N, warp_n = warp % WARPS_N;
    const int row0 = warp_m * MT * 16, column0 = warp_n * QT * 8;  // first of this warp's scores
    const Lane lane;

    const Band band(p, b);
    const Range queries = band.queries_of(k0, k0 + BLOCK_K);
    k_tile.template load<THREADS, VECTOR>(
        rows_of<Element>(p.k, p.k_at, b, kv) + k0 * p.k_at.n, p.k_at.n, band.length - k0, int(p.D));
    v_tile.template load<THREADS, VECTOR>(
        rows_of<Element>(p.v, p.v_at, b, kv) + k0 * p.v_at.n, p.v_at.n, band.length - k0,
        int(p.Dv));
    copy_commit();
    Fragment<Sum, MT, DT> dk;
    Fragment<Sum, MT, VT> dv;
    dk.clear();
    dv.clear();
    for (int g = 0; g < p.group; ++g) {
        const Head head(p, b, kv * int(p.group) + g);
        Visits visit(queries.lo / BLOCK_Q, (queries.hi + BLOCK_Q - 1) / BLOCK_Q, [&](int n) {
            return head.sight.kind(n * BLOCK_Q, n * BLOCK_Q + BLOCK_Q, k0, k0 + BLOCK_K);
        });
        auto load_queries = [&](int q0, int stage) {
            const int rows = int(p.Nq) - q0;
            q_tile(stage).template load<THREADS, VECTOR>(head.q + q0 * p.q_at.n, p.q_at.n, rows,
                                                         int(p.D));
            dout_tile(stage).template load<THREADS, VECTOR>(head.dout + q0 * p.dout_at.n,
                                                            p.dout_at.n, rows, int(p.Dv));
            copy_row<THREADS>(shifts[stage], head.shift() + q0);
            copy_row<THREADS>(deltas[stage], head.delta() + q0);
            copy_commit();
        };
        int stage = 0;
        __syncthreads();  // everybody is done with the last head
        if (!visit.done()) load_queries(visit.tile * BLOCK_Q, 0);
        while (!visit.done()) {
            const int q0 = visit.tile * BLOCK_Q, kind = visit.kind;
            const QueryTile q = q_tile(stage);
            const OutTile dout = dout_tile(stage);
            const Sum *shift = shifts[stage], *delta = deltas[stage];
            copy_wait<0>();
            __syncthreads();  // this visit's queries are here, and everybody is done with the last
            visit.next();
            if (STAGES > 1 && !visit.done()) load_queries(visit.tile * BLOCK_Q, stage ^= 1);

            auto query = [&](int n, int e) { return column0 + 8 * n + lane.column(e); };
            TileGradient<true, MT, QT> tile(k0 + row0, q0 + column0);
            multiply<HEAD_DIM>(tile.p, k_tile, row0, q, column0);
            tile.probabilities(head.terms, head.sight, head.dropout, kind,
                               [&](int, int n, int e) { return shift[query(n, e)]; });
            multiply<VALUE_DIM>(tile.ds, v_tile, row0, dout, column0);
            tile.at_scores(Sum(p.gain), [&](int, int n, int e) { return delta[query(n, e)]; });
            tile.at_products();
            tile.p.for_each([&](Sum& x, int, int, int, int, int) { x = tile.dropped(x); });

            if constexpr (ADD_DQ || WARPS_N > 1) store_fragment(ds_tile, tile.ds, row0, column0);
            if constexpr (WARPS_N > 1) {
                store_fragment(p_tile, tile.p, row0, column0);
                __syncthreads();  // the probabilities of all queries are here
                multiply_rows<false, BLOCK_Q>(dv, p_tile, row0, dout, warp_n * VT * 8);
                multiply_rows<false, BLOCK_Q>(dk, ds_tile, row0, q, warp_n * DT * 8);
            } else {
                multiply(dv, tile.p, dout, 0);
                multiply(dk, tile.ds, q, 0);
                if constexpr (ADD_DQ) __syncthreads();  // the gradients of all keys are here
            }
            if constexpr (ADD_DQ) {
                const int m0 = warp / DQ_N * DQ_MT * 16, n0 = warp % DQ_N * DQ_NT * 8;
                Fragment<Sum, DQ_MT, DQ_NT> dq;
                dq.clear();
                multiply_rows<true, BLOCK_K>(dq, ds_tile, m0, k_tile, n0);
                add_rows(static_cast<Sum*>(p.dq_sum) + head.row(q0) * HEAD_DIM, HEAD_DIM, dq, m0,
                         n0, int(p.Nq) - q0);
            }
            if constexpr (STAGES == 1) {
                __syncthreads();  // everybody is done with the queries
                if (!visit.done()) load_queries(visit.tile * BLOCK_Q, 0);
            }
        }
    }
    copy_wait<0>();
    for (int j = threadIdx.x; j < BLOCK_K; j += THREADS) bad[j] = false;
    __syncthreads();  // everybody is done with the keys and values

    auto finish = [&](auto& sums, Sum factor) {
        for (auto& rows : sums.x)
            for (auto& atom : rows)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    atom[e] *= factor;
                    if (!is_finite(atom[e])) bad[row0 + int(&rows - sums.x) * 16 + lane.row(e)] = true;
                }
    };
    finish(dk, Sum(p.scale));
    finish(dv, Sum(p.gain));
    store_fragment(k_tile, dk, row0, warp_n * DT * 8);
    store_fragment(v_tile, dv, row0, warp_n * VT * 8);
    __syncthreads();
    k_tile.template store<THREADS, VECTOR>(rows_of<Element>(p.dk, p.dk_at, b, kv) + k0 * p.dk_at.n,
                                           p.dk_at.n, int(p.Nk) - k0, int(p.D));
    v_tile.template store<THREADS, VECTOR>(rows_of<Element>(p.dv, p.dv_at, b, kv) + k0 * p.dv_at.n,
                                           p.dv_at.n, int(p.Nk) - k0, int(p.Dv));

    // Rows that are not finite, once more and textbook-like, after everybody has stored.
    __syncthreads();
    for (int j = warp; j < BLOCK_K; j += WARPS)
        if (bad[j] && k0 + j < p.Nk) key_row(p, b, kv, k0 + j);
}
