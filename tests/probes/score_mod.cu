// Probe of score_mod.cuh: scores and softcap slopes of a matrix of products, and the tanh they use.
#include "score_mod.cuh"

// Head blockIdx.x of batch entry blockIdx.y; rows and columns may reach past Nq and Nk.
extern "C" __global__ void scored(Params p, const i64* offsets, const Accum* slopes,
                                  const BiasElement* bias, const Accum* products, i64 rows,
                                  i64 columns, Accum* scores, Accum* dsoftcap,
                                  Accum* softmax_scale_log2) {
    p.q_offset = offsets;
    p.alibi_slopes = slopes;
    p.bias = bias;
    const ScoreMod score_mod(p, blockIdx.y, blockIdx.x);
    const i64 first = (blockIdx.y * p.Hq + blockIdx.x) * rows * columns;
    for (i64 n = threadIdx.x; n < rows * columns; n += blockDim.x) {
        const int i = int(n / columns), j = int(n % columns);
        Accum dfunction;
        const Accum added = score_mod.bias_of(min(i, score_mod.Nq - 1), min(j, score_mod.Nk - 1));
        scores[first + n] = score_mod.score(products[first + n], i, j, added, dsoftcap[first + n], dfunction);
    }
    if (threadIdx.x == 0) *softmax_scale_log2 = score_mod.softmax_scale_log2();
}

extern "C" __global__ void tanhs(const Accum* x, Accum* y, i64 count) {
    for (i64 n = threadIdx.x; n < count; n += blockDim.x) y[n] = tanh_of(x[n]);
}
