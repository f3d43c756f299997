// Gradient at the bias: one block of threads for each tile of the bias, which sums the gradient at
// the scores over all that the bias is broadcast over, in a fixed order.
#include "gradient.cuh"
#include "plain.cuh"

constexpr int MT = BLOCK_Q / (16 * WARPS_M);
constexpr int NT = BLOCK_K / 8;
constexpr int WARPS = WARPS_M;
static_assert(WARPS_N == 1, "a warp holds whole rows of scores");

using QueryTile = Tile<Element, BLOCK_Q, HEAD_DIM>;
using KeyTile = Tile<Element, BLOCK_K, HEAD_DIM>;
using OutTile = Tile<Element, BLOCK_Q, VALUE_DIM>;
using ValueTile = Tile<Element, BLOCK_K, VALUE_DIM>;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    backward_bias(const __grid_constant__ Params p) {
    // First the queries and keys lie here, then dout and the values.
    extern __shared__ __align__(1024) char memory[];
    const QueryTile q_tile{memory};
    const KeyTile k_tile{memory + QueryTile::BYTES};
    const OutTile dout_tile{memory};
    const ValueTile v_tile{memory + OutTile::BYTES};
    __shared__ Sum column_sums[WARPS][BLOCK_K];

    const int q_blocks = int((p.Nq + BLOCK_Q - 1) / BLOCK_Q);
    const int k_blocks = int((p.Nk + BLOCK_K - 1) / BLOCK_K);
    const bool one_row = p.bias_Nq == 1, one_column = p.bias_Nk == 1;
    i64 rest = blockIdx.x;
    const int c = one_column ? 0 : int(rest % k_blocks);
    rest /= one_column ? 1 : k_blocks;
    const int r = one_row ? 0 : int(rest % q_blocks);
    rest /= one_row ? 1 : q_blocks;
    const i64 own_h = rest % p.bias_H, own_b = rest / p.bias_H;
    const int warp = threadIdx.x / WARP, row0 = warp * MT * 16;
    const Lane lane;

    Fragment<Sum, MT, NT> sum;
    sum.clear();
    auto add_tile = [&](i64 b, i64 h, int q0, int k0, int kind) {
        const Head head(p, b, h);
        const int rows = int(p.Nq) - q0, keys = head.sight.band.length - k0;
        TileGradient<false, MT, NT> tile(q0 + row0, k0);
        tile.p.prefetch(head.sight);
        __syncthreads();  // everybody is done with the last values
        q_tile.template load<THREADS, VECTOR>(head.q + q0 * p.q_at.n, p.q_at.n, rows, int(p.D));
        k_tile.template load<THREADS, VECTOR>(head.k + k0 * p.k_at.n, p.k_at.n, keys, int(p.D));
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        multiply<HEAD_DIM>(tile.p, q_tile, row0, k_tile, 0);
        __syncthreads();
        dout_tile.template load<THREADS, VECTOR>(head.dout + q0 * p.dout_at.n, p.dout_at.n, rows,
                                                 int(p.Dv));
        v_tile.template load<THREADS, VECTOR>(head.v + k0 * p.v_at.n, p.v_at.n, keys, int(p.Dv));
        copy_commit();
        auto row_of = [&](int m, int e) { return q0 + row0 + 16 * m + lane.row(e); };
        tile.probabilities(head.terms, head.sight, head.dropout, kind,
                           [&](int m, int, int e) { return head.shift()[row_of(m, e)]; },
                           [](auto&) {});
        copy_wait<0>();
        __syncthreads();
        multiply<VALUE_DIM>(tile.ds, dout_tile, row0, v_tile, 0);
        tile.at_scores(Sum(p.gain),
                       [&](int m, int, int e) { return head.delta()[row_of(m, e)]; });
        tile.ds.for_each([&](Sum& x, int, int, int m, int n, int e) { sum.x[m][n][e] += x; });
    };
    for (i64 b = p.bias_B == 1 ? 0 : own_b; b < (p.bias_B == 1 ? p.B : own_b + 1); ++b)
        for (i64 h = p.bias_H == 1 ? 0 : own_h; h < (p.bias_H == 1 ? p.Hq : own_h + 1); ++h) {
            const Sight sight(p, b, h);
            for (int q = one_row ? 0 : r; q < (one_row ? q_blocks : r + 1); ++q)
                for (int k = one_column ? 0 : c; k < (one_column ? k_blocks : c + 1); ++k) {
                    const int q0 = q * BLOCK_Q, k0 = k * BLOCK_K;
                    const int kind = sight.kind(q0, q0 + BLOCK_Q, k0, k0 + BLOCK_K);
                    if (kind != SKIP) add_tile(b, h, q0, k0, kind);
                }
        }

    BiasElement* dbias = static_cast<BiasElement*>(p.dbias) + own_b * p.dbias_at.b +
                         own_h * p.dbias_at.h;
    const int rows = one_row ? 1 : int(p.Nq) - r * BLOCK_Q;
    const int columns = one_column ? 1 : int(p.Nk) - c * BLOCK_K;
    auto write = [&](int i, int j, Sum x) {
        if (i < rows && j < columns)
            dbias[(r * BLOCK_Q + i) * p.dbias_at.i + (c * BLOCK_K + j) * p.dbias_at.j] =
                narrow<BiasElement>(x);
    };
    if (one_column) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Sum total = 0;
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    total += sum.x[m][n][2 * half] + sum.x[m][n][2 * half + 1];
                total += __shfl_xor_sync(~0u, total, 1);
                total += __shfl_xor_sync(~0u, total, 2);
                sum.x[m][0][2 * half] = total;
                if (!one_row && lane.t == 0) write(row0 + 16 * m + lane.row(2 * half), 0, total);
            }
    }
    if (one_row) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                Sum total = 0;
#pragma unroll
                for (int m = 0; m < MT; ++m) total += sum.x[m][n][e] + sum.x[m][n][e + 2];
#pragma unroll
                for (int step = 4; step < WARP; step *= 2)
                    total += __shfl_xor_sync(~0u, total, step);
                if (lane.g == 0) column_sums[warp][8 * n + lane.column(e)] = total;
            }
        __syncthreads();
        for (int j = threadIdx.x; j < BLOCK_K; j += THREADS) {
            Sum total = 0;
            for (int w = 0; w < WARPS; ++w) total += column_sums[w][j];
            write(0, j, total);
        }
    }
    if (!one_row && !one_column) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    write(row0 + 16 * m + lane.row(e), 8 * n + lane.column(e), sum.x[m][n][e]);
    }
}
