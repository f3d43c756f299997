// Probe of scores.cuh: scores and derivatives of a matrix of products, and the tanh they use.
#include "scores.cuh"

// Head blockIdx.x of batch entry blockIdx.y; rows and columns may reach past Nq and Nk.
extern "C" __global__ void scored(Params p, const i64* offsets, const Sum* slopes,
                                  const BiasElement* bias, const Sum* products, i64 rows,
                                  i64 columns, Sum* scores, Sum* derivatives, Sum* unit) {
    p.offsets = offsets;
    p.slopes = slopes;
    p.bias = bias;
    const Terms terms(p, blockIdx.y, blockIdx.x);
    const i64 first = (blockIdx.y * p.Hq + blockIdx.x) * rows * columns;
    for (i64 n = threadIdx.x; n < rows * columns; n += blockDim.x) {
        const int i = int(n / columns), j = int(n % columns);
        const Sum added = terms.bias_of(min(i, terms.Nq - 1), min(j, terms.Nk - 1));
        scores[first + n] = terms.score(products[first + n], i, j, added, derivatives[first + n]);
    }
    if (threadIdx.x == 0) *unit = terms.unit();
}

extern "C" __global__ void tanhs(const Sum* x, Sum* y, i64 count) {
    for (i64 n = threadIdx.x; n < count; n += blockDim.x) y[n] = tanh_of(x[n]);
}
