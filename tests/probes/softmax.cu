// Probe of softmax.cuh: one warp updates its state tile by tile, and stores all that it gets.
#include "softmax.cuh"

constexpr int MT = BLOCK_Q / 16, NT = BLOCK_K / 8;

// products, p: (tiles, BLOCK_Q, BLOCK_K); m, rescale: (tiles, BLOCK_Q, 4); weight, lse:
// (BLOCK_Q, 4), the last axis being the lanes that share a row.
extern "C" __global__ void updated(const Accum* products, i64 tiles, Accum softmax_scale_log2,
                                    const Accum* sinks, Accum dropout_scale, Accum softmax_scale,
                                    Accum* p, Accum* m, Accum* rescale, Accum* weight, Accum* lse) {
    const Lane lane;
    const RowGroup group(BLOCK_Q);
    RowState<MT> state;
    for (i64 tile = 0; tile < tiles; ++tile) {
        Fragment<Accum, MT, NT> s;
        auto for_each = [&](auto visit) {
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        visit(s.x[i][n][e], (tile * BLOCK_Q + 16 * i + lane.row(e)) * BLOCK_K +
                                                8 * n + lane.column(e));
        };
        for_each([&](Accum& x, i64 at) { x = products[at]; });
        Accum factor[MT][2];
        state.update(s, softmax_scale_log2, group, factor);
        for_each([&](Accum& x, i64 at) { p[at] = x; });
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const i64 at = (tile * BLOCK_Q + 16 * i + lane.row(2 * half)) * 4 + lane.t;
                m[at] =
                    state.m[i][half] * (state.needs_max_first(i, half) ? softmax_scale_log2 : Accum(1));
                rescale[at] = factor[i][half];
            }
    }
    state.reduce_sums(group);
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * i + lane.row(2 * half);
            weight[row * 4 + lane.t] = state.finalize(i, half, sinks[row], dropout_scale,
                                                      softmax_scale, lse[row * 4 + lane.t]);
        }
}
