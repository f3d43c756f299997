// Layer 3. Compute dS of all score tiles that a CTA sums over, in a fixed order: two GEMMs for each tile.
// With two stages the operands of one GEMM are loaded during the other. Always NaN-safe: dS of a score
// depends only on that score.
#pragma once

#include "ds_steps.cuh"
#include "gradient.cuh"

using QueryTile = Tile<Element, BLOCK_Q, HEAD_DIM>;
using KeyTile = Tile<Element, BLOCK_K, HEAD_DIM>;
using DoutTile = Tile<Element, BLOCK_Q, VALUE_DIM>;
using ValueTile = Tile<Element, BLOCK_K, VALUE_DIM>;
constexpr int SCORE_BYTES = QueryTile::BYTES + KeyTile::BYTES;
constexpr int VALUE_BYTES = DoutTile::BYTES + ValueTile::BYTES;
constexpr int TILE_BYTES = STAGES > 1                  ? SCORE_BYTES + VALUE_BYTES
                           : SCORE_BYTES > VALUE_BYTES ? SCORE_BYTES
                                                       : VALUE_BYTES;

constexpr int BIAS_AT = TILE_BYTES + 2 * BLOCK_Q * int(sizeof(Accum));
constexpr int DS_BYTES = BIAS_AT + WarpBias<false, MT, NT, true>::BYTES;  // of dynamic shared memory

// Call sum(ds, b, h) for the dS of each step, which is 0 past the last query. All threads call.
template <class Sum>
__device__ inline void for_each_ds(const Params& p, Steps step, char* memory, Sum sum) {
    const QueryTile q_tile{memory};
    const KeyTile k_tile{q_tile.base + QueryTile::BYTES};
    const DoutTile dout_tile{memory + (STAGES > 1 ? SCORE_BYTES : 0)};
    const ValueTile v_tile{dout_tile.base + DoutTile::BYTES};
    using Row = Accum[BLOCK_Q];
    Row& lse_log2 = reinterpret_cast<Row*>(memory + TILE_BYTES)[0];
    Row& deltas = reinterpret_cast<Row*>(memory + TILE_BYTES)[1];
    const WarpBias<false, MT, NT, true> bias(memory + BIAS_AT);
    const int row0 = first_row(), column0 = first_column();
    const Lane lane;
    auto load_keys = [&] {
        const int b = step.b.at, h = step.h.at, q0 = step.q0(), k0 = step.k0();
        const Sequence& sequence = step.sequence;
        q_tile.template load<THREADS, ALIGNMENT_BYTES>(
            sequence.queries<Element>(p.q, p.q_at, h) + q0 * p.q_at.n, p.q_at.n, int(sequence.Nq) - q0,
            int(p.D));
        k_tile.template load<THREADS, ALIGNMENT_BYTES>(
            sequence.keys<Element>(p.k, p.k_at, step.key_head) + k0 * p.k_at.n, p.k_at.n,
            step.length - k0, int(p.D));
        copy_row<THREADS>(lse_log2, static_cast<const Accum*>(p.lse_log2) + step.row());
        copy_commit();
        bias.load(ScoreMod(p, b, h), q0 + row0, k0 + column0);
    };
    auto load_values = [&] {
        const int h = step.h.at, q0 = step.q0(), k0 = step.k0();
        const Sequence& sequence = step.sequence;
        dout_tile.template load<THREADS, ALIGNMENT_BYTES>(
            sequence.queries<Element>(p.dout, p.dout_at, h) + q0 * p.dout_at.n, p.dout_at.n,
            int(sequence.Nq) - q0, int(p.Dv));
        v_tile.template load<THREADS, ALIGNMENT_BYTES>(
            sequence.keys<Element>(p.v, p.v_at, step.key_head) + k0 * p.v_at.n, p.v_at.n,
            step.length - k0, int(p.Dv));
        copy_row<THREADS>(deltas, static_cast<const Accum*>(p.delta) + step.row());
        copy_commit();
    };
    auto row = [&](int m, int e) { return row0 + 16 * m + lane.row(e); };
    auto read_rows = [&](Accum(&own)[MT][2], const Row& all) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) own[m][half] = all[row(m, 2 * half)];
    };

    if (!step.done) load_keys();
    while (!step.done) {
        copy_wait<0>();
        __syncthreads();  // q and k have landed, and all warps are done with the previous v
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
        const Accum* const row_max = static_cast<const Accum*>(p.row_max) + step.row();
        tile.recompute_p(
            score_mod, bias, attn_mask, dropout, step.kind,
            head_flags(p, step.b.at, step.key_head) & LARGE_SCORES,
            [&](int m, int, int e) { return row_max[row(m, e)]; },
            [&](int m, int, int e) { return statistic[m][e / 2]; });

        copy_wait<0>();
        __syncthreads();  // dO and v have landed, and all warps are done with k and the lse
        const int b = step.b.at, h = step.h.at, Nq = attn_mask.Nq;
        step.next();
        if (STAGES > 1 && !step.done) load_keys();
        multiply<VALUE_DIM, VALUE_DIM / 16, false, true>(tile.ds, dout_tile, row0, v_tile, column0);
        read_rows(statistic, deltas);
        tile.compute_ds(Accum(p.dropout_scale),
                        [&](int m, int, int e) { return statistic[m][e / 2]; });
        // Queries past the end may attend to a non-finite key that is masked out for all other queries.
        tile.ds.for_each([&](Accum& x, int i, int, int, int, int) { x = i < Nq ? x : Accum(0); });
        sum(tile.ds, b, h);
        if (STAGES == 1) {
            __syncthreads();  // all warps are done with v
            if (!step.done) load_keys();
        }
    }
}
