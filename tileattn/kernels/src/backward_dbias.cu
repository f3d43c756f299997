// dbias: one CTA for each tile of the bias sums dS over all that the bias is broadcast over, in a
// fixed order. Each step takes two GEMMs. With two stages, the operands of one are loaded during
// the other. Always NaN-safe: dS of a score comes from that score alone.
#include "gradient.cuh"

constexpr int MT = BLOCK_Q / (16 * WARPS_M);
constexpr int NT = BLOCK_K / (8 * WARPS_N);
constexpr int SWIZZLE = 8;  // L2 swizzle: rows of tiles that neighbouring CTAs go down together
static_assert(NT % 2 == 0, "atoms are loaded in pairs");

using QueryTile = Tile<Element, BLOCK_Q, HEAD_DIM>;
using KeyTile = Tile<Element, BLOCK_K, HEAD_DIM>;
using DoutTile = Tile<Element, BLOCK_Q, VALUE_DIM>;
using ValueTile = Tile<Element, BLOCK_K, VALUE_DIM>;
constexpr int SCORE_BYTES = QueryTile::BYTES + KeyTile::BYTES;
constexpr int VALUE_BYTES = DoutTile::BYTES + ValueTile::BYTES;
constexpr int TILE_BYTES = STAGES > 1                  ? SCORE_BYTES + VALUE_BYTES
                           : SCORE_BYTES > VALUE_BYTES ? SCORE_BYTES
                                                       : VALUE_BYTES;

// What a CTA covers of one axis: all of it where the bias is broadcast, else one block.
struct Axis {
    int begin, end, at;

    __device__ Axis(bool broadcast, i64 own, i64 size)
        : begin(broadcast ? 0 : int(own)), end(broadcast ? int(size) : begin + 1), at(begin) {}

    // Advance, or start over behind the last; whether it advanced.
    __device__ bool next() {
        if (++at < end) return true;
        at = begin;
        return false;
    }
};

// The score tiles that a CTA sums over, keys fastest. All threads call.
struct Steps {
    const Params& p;
    Axis b, h, q, k;
    int key_head, length, kind;
    bool done = false;

    __device__ Steps(const Params& p, Axis b, Axis h, Axis q, Axis k)
        : p(p), b(b), h(h), q(q), k(k) {
        --this->k.at;
        next();
    }
    __device__ int q0() const { return q.at * BLOCK_Q; }
    __device__ int k0() const { return k.at * BLOCK_K; }

    __device__ void next() {
        do {
            done = !(k.next() || q.next() || h.next() || b.next());
            if (done) return;
            const AttentionMask attn_mask(p, b.at, h.at);
            kind = attn_mask.kind(q0(), q0() + BLOCK_Q, k0(), k0() + BLOCK_K);
            length = attn_mask.window.length;
        } while (kind == EMPTY);
        key_head = h.at / int(p.group);
    }
};

// Sum each row into the first column.
__device__ inline void reduce_columns(Fragment<Accum, MT, NT>& sum) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Accum total = 0;
#pragma unroll
            for (int n = 0; n < NT; ++n) total += sum.x[m][n][2 * half] + sum.x[m][n][2 * half + 1];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            sum.x[m][0][2 * half] = total;
        }
}

// Sum each column into the first row.
__device__ inline void reduce_rows(Fragment<Accum, MT, NT>& sum) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            Accum total = 0;
#pragma unroll
            for (int m = 0; m < MT; ++m) total += sum.x[m][n][e] + sum.x[m][n][e + 2];
#pragma unroll
            for (int step = 4; step < WARP; step *= 2) total += __shfl_xor_sync(~0u, total, step);
            sum.x[0][n][e] = total;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_dbias(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char memory[];
    const QueryTile q_tile{memory};
    const KeyTile k_tile{q_tile.base + QueryTile::BYTES};
    const DoutTile dout_tile{memory + (STAGES > 1 ? SCORE_BYTES : 0)};
    const ValueTile v_tile{dout_tile.base + DoutTile::BYTES};
    using Row = Accum[BLOCK_Q];
    Row& lse_log2 = reinterpret_cast<Row*>(memory + TILE_BYTES)[0];
    Row& deltas = reinterpret_cast<Row*>(memory + TILE_BYTES)[1];
    const WarpBias<false, MT, NT> bias(memory + TILE_BYTES + 2 * sizeof(Row));

    const int Nq = int(p.Nq);
    const bool one_row = p.bias_Nq == 1, one_column = p.bias_Nk == 1;
    const int q_blocks = (Nq + BLOCK_Q - 1) / BLOCK_Q;
    const int k_blocks = int((p.Nk + BLOCK_K - 1) / BLOCK_K);
    const int height = one_row ? 1 : q_blocks, width = one_column ? 1 : k_blocks;
    const int within = int(blockIdx.x % (i64(height) * width));
    const i64 bh = blockIdx.x / (i64(height) * width);
    // CTAs that run at a time load few tiles of q and few of k.
    const int top = within / (SWIZZLE * width) * SWIZZLE,
              rows_of_group = min(SWIZZLE, height - top);
    const int r = top + (within - top * width) % rows_of_group;
    const int c = (within - top * width) / rows_of_group;
    const i64 own_b = bh / p.bias_H, own_h = bh % p.bias_H;
    const int warp_m = threadIdx.x / WARP / WARPS_N, warp_n = threadIdx.x / WARP % WARPS_N;
    const int row0 = warp_m * MT * 16, column0 = warp_n * NT * 8;  // first of this warp's scores
    const Lane lane;

    Steps step(p, Axis(p.bias_B == 1, own_b, p.B), Axis(p.bias_H == 1, own_h, p.Hq),
               Axis(one_row, r, q_blocks), Axis(one_column, c, k_blocks));
    auto load_keys = [&] {
        const int b = step.b.at, h = step.h.at, q0 = step.q0(), k0 = step.k0();
        const i64 row = (b * p.Hq + h) * p.rows + q0;
        q_tile.template load<THREADS, ALIGNMENT_BYTES>(
            rows_of<Element>(p.q, p.q_at, b, h) + q0 * p.q_at.n, p.q_at.n, Nq - q0, int(p.D));
        k_tile.template load<THREADS, ALIGNMENT_BYTES>(
            rows_of<Element>(p.k, p.k_at, b, step.key_head) + k0 * p.k_at.n, p.k_at.n,
            step.length - k0, int(p.D));
        copy_row<THREADS>(lse_log2, static_cast<const Accum*>(p.lse_log2) + row);
        copy_commit();
        bias.load(ScoreMod(p, b, h), q0 + row0, k0 + column0);
    };
    auto load_values = [&] {
        const int b = step.b.at, h = step.h.at, q0 = step.q0(), k0 = step.k0();
        const i64 row = (b * p.Hq + h) * p.rows + q0;
        dout_tile.template load<THREADS, ALIGNMENT_BYTES>(
            rows_of<Element>(p.dout, p.dout_at, b, h) + q0 * p.dout_at.n, p.dout_at.n, Nq - q0,
            int(p.Dv));
        v_tile.template load<THREADS, ALIGNMENT_BYTES>(
            rows_of<Element>(p.v, p.v_at, b, step.key_head) + k0 * p.v_at.n, p.v_at.n,
            step.length - k0, int(p.Dv));
        copy_row<THREADS>(deltas, static_cast<const Accum*>(p.delta) + row);
        copy_commit();
    };
    auto row = [&](int m, int e) { return row0 + 16 * m + lane.row(e); };
    auto read_rows = [&](Accum(&own)[MT][2], const Row& all) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) own[m][half] = all[row(m, 2 * half)];
    };

    Fragment<Accum, MT, NT> sum;
    sum.clear();
    if (!step.done) load_keys();
    while (!step.done) {
        copy_wait<0>();
        __syncthreads();  // q and k have landed, and all warps are done with the last v
        if (STAGES > 1) load_values();
        const AttentionMask attn_mask(p, step.b.at, step.h.at);
        const ScoreMod score_mod(p, step.b.at, step.h.at);
        const Dropout dropout(p, step.b.at, step.h.at);
        TileGradient<false, MT, NT, true> tile(step.q0() + row0, step.k0() + column0);
        tile.load_mask(attn_mask);
        multiply<HEAD_DIM, HEAD_DIM / 16, false, true>(tile.p, q_tile, row0, k_tile, column0);
        if (STAGES == 1) {
            __syncthreads();  // all warps are done with k
            load_values();
        }
        Accum statistic[MT][2];
        read_rows(statistic, lse_log2);
        const Accum* const row_max = static_cast<const Accum*>(p.row_max) +
                                     (step.b.at * p.Hq + step.h.at) * p.rows + step.q0();
        tile.recompute_p(
            score_mod, bias, attn_mask, dropout, step.kind,
            head_flags(p, step.b.at, step.key_head) & LARGE,
            [&](int m, int, int e) { return row_max[row(m, e)]; },
            [&](int m, int, int e) { return statistic[m][e / 2]; });

        copy_wait<0>();
        __syncthreads();  // dO and v have landed, and all warps are done with k and the lse
        step.next();
        if (STAGES > 1 && !step.done) load_keys();
        multiply<VALUE_DIM, VALUE_DIM / 16, false, true>(tile.ds, dout_tile, row0, v_tile, column0);
        read_rows(statistic, deltas);
        tile.compute_ds(Accum(p.dropout_scale),
                        [&](int m, int, int e) { return statistic[m][e / 2]; });
        // Queries past the end may attend to a key that is masked out for all others, and not
        // finite.
        tile.ds.for_each([&](Accum& x, int i, int, int m, int n, int e) {
            sum.x[m][n][e] += i < Nq ? x : Accum(0);
        });
        if (STAGES == 1) {
            __syncthreads();  // all warps are done with v
            if (!step.done) load_keys();
        }
    }

    BiasElement* const dbias = static_cast<BiasElement*>(p.dbias) + own_b * p.dbias_at.b +
                               own_h * p.dbias_at.h + r * BLOCK_Q * p.dbias_at.i +
                               c * BLOCK_K * p.dbias_at.j;
    const int rows = one_row ? 1 : Nq - r * BLOCK_Q;
    const int columns = one_column ? 1 : int(p.Nk) - c * BLOCK_K;
    auto write = [&](int i, int j, Accum x) {
        if (i < rows && j < columns)
            dbias[i * p.dbias_at.i + j * p.dbias_at.j] = narrow<BiasElement>(x);
    };
    if (!one_row && !one_column) {
        struct alignas(2 * sizeof(BiasElement)) Two {
            BiasElement x, y;
        };
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 4; e += 2)
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    const int i = row(m, e), j = column0 + 8 * n + lane.column(0);
                    const Accum x = sum.x[m][n][e], y = sum.x[m][n][e + 1];
                    if constexpr (BIAS_ALIGNMENT_BYTES % sizeof(Two) == 0 &&
                                  BIAS_ALIGNMENT_BYTES > 0) {
                        // dbias is contiguous, of the bias's shape: what held for that holds here.
                        if (i < rows && j < columns)
                            *reinterpret_cast<Two*>(dbias + i * p.dbias_at.i + j) = {
                                narrow<BiasElement>(x), narrow<BiasElement>(y)};
                    } else {
                        write(i, j, x);
                        write(i, j + 1, y);
                    }
                }
        return;
    }

    // Along an axis of length 1 every warp has a share, summed in the order of the warps.
    Accum* const shares = reinterpret_cast<Accum*>(memory);
    const int pitch = one_column ? WARPS_N : BLOCK_K;
    if (one_column) reduce_columns(sum);
    if (one_row) reduce_rows(sum);
    __syncthreads();  // all warps are done with v
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool first_row = m == 0 && lane.row(e) == 0;
                const bool first_column = n == 0 && lane.column(e) == 0;
                if ((first_row || !one_row) && (first_column || !one_column))
                    shares[(one_row ? warp_m : row(m, e)) * pitch +
                           (one_column ? warp_n : column0 + 8 * n + lane.column(e))] =
                        sum.x[m][n][e];
            }
    __syncthreads();
    for (int x = threadIdx.x; x < (one_row ? 1 : BLOCK_Q) * (one_column ? 1 : BLOCK_K);
         x += THREADS) {
        const int i = one_row ? 0 : x, j = one_row ? x : 0;
        Accum total = 0;
        for (int m = i; m < (one_row ? WARPS_M : i + 1); ++m)
            for (int n = j; n < (one_column ? WARPS_N : j + 1); ++n) total += shares[m * pitch + n];
        write(i, j, total);
    }
}
