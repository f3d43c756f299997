// Probe of philox.cuh: the generator, the test of one pair, and the loop over a fragment.
#include "philox.cuh"

extern "C" __global__ void encrypted(const Words* counters, const u32* keys, Words* words,
                                     i64 count) {
    for (i64 n = threadIdx.x; n < count; n += blockDim.x)
        words[n] = philox4x32(counters[n], keys[2 * n], keys[2 * n + 1]);
}

// Every pair of head h of batch entry b.
extern "C" __global__ void kept(const __grid_constant__ Params p, i64 b, i64 h, bool* out) {
    const Dropout dropout(p, b, h);
    for (i64 n = threadIdx.x; n < p.Nq * p.Nk; n += blockDim.x)
        out[n] = dropout.keeps(int(n / p.Nk), int(n % p.Nk));
}

constexpr int MT = 3, NT = 4;

template <bool TRANSPOSED>
__device__ void walk(const Dropout& dropout, int row, int column, bool* out) {
    const Lane lane;
    dropout.for_each<TRANSPOSED, MT, NT>(row, column, [&](int m, int n, int e, bool kept) {
        out[(16 * m + lane.row(e)) * 8 * NT + 8 * n + lane.column(e)] = kept;
    });
}
// Accumulators that begin at (row, column); transposed ones have keys as rows.
extern "C" __global__ void kept_in_fragment(const __grid_constant__ Params p, i64 b, i64 h, i64 row,
                                  i64 column, i64 transposed, bool* out) {
    const Dropout dropout(p, b, h);
    if (transposed)
        walk<true>(dropout, int(row), int(column), out);
    else
        walk<false>(dropout, int(row), int(column), out);
}
