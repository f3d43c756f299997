// Probe of bias.cuh: the bias as a fragment, and its gradient as it is stored.
#include "bias.cuh"

constexpr int MT = BLOCK_Q / (16 * WARPS_M), NT = BLOCK_K / 8;

template <bool TRANSPOSED>
__device__ void biased(const ScoreMod& score_mod, int row, int column, const Accum* gradients,
                       Accum* added, BiasElement* dbias) {
    using Bias = WarpBias<TRANSPOSED, MT, NT>;
    __shared__ __align__(1024) char memory[Bias::BYTES + 1];
    const Bias bias(memory);
    const Lane lane;
    const int first = threadIdx.x / WARP * 16 * MT;  // row of this warp
    const int i = TRANSPOSED ? column : row + first, j = TRANSPOSED ? row + first : column;
    bias.load(score_mod, i, j);
    copy_wait<0>();
    __syncwarp();
    Fragment<Accum, MT, NT> ds;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            Accum x[2][4];
            bias.read(x, score_mod, row + first, column, m, n);
#pragma unroll
            for (int a = 0; a < 2; ++a)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int at =
                        (first + 16 * m + lane.row(e)) * BLOCK_K + 8 * (n + a) + lane.column(e);
                    added[at] = x[a][e];
                    ds.x[m][n + a][e] = gradients[at];
                }
        }
    if constexpr (TRANSPOSED) bias.write(dbias, score_mod, i, j, ds);
}

// BLOCK_Q x BLOCK_K scores that begin at (row, column); transposed ones have keys as rows.
extern "C" __global__ void added(Params p, const BiasElement* bias, i64 row, i64 column,
                                 i64 transposed, const Accum* gradients, Accum* sums,
                                 BiasElement* dbias) {
    p.bias = bias;
    const ScoreMod score_mod(p, 0, 0);
    if (transposed)
        biased<true>(score_mod, int(row), int(column), gradients, sums, dbias);
    else
        biased<false>(score_mod, int(row), int(column), gradients, sums, dbias);
}
