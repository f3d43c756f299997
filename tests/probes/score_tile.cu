// Probe of score_tile.cuh: the index of each element of a fragment, and what masked_fill and drop
// leave.
#include "score_tile.cuh"

constexpr int MT = BLOCK_Q / 16, NT = BLOCK_K / 8;

struct Index {
    int i, j;
};

template <bool TRANSPOSED>
__device__ void masked(const Params& p, i64 b, i64 h, int row, int column, Index* indices,
                       Accum* values) {
    const Lane lane;
    auto at = [&](int m, int n, int e) {
        return (16 * m + lane.row(e)) * BLOCK_K + 8 * n + lane.column(e);
    };
    Scores<TRANSPOSED, MT, NT> s(row, column);
    s.for_each([&](Accum& x, int i, int j, int m, int n, int e) {
        indices[at(m, n, e)] = {i, j};
        x = 1;
    });
    const AttentionMask attn_mask(p, b, h);
    DenseMask<TRANSPOSED, MT, NT> dense;
    if constexpr (HAS_MASK) {
        dense.load(attn_mask, row, column);
        dense.share();
    }
    s.masked_fill(attn_mask, dense);
    for (int n = 0; n < NT; n += 2) s.drop(Dropout(p, b, h), n);
    s.for_each([&](Accum& x, int, int, int m, int n, int e) { values[at(m, n, e)] = x; });
}

// A fragment of ones from (row, column) on; a transposed one has keys as rows.
extern "C" __global__ void masked_out(Params p, const bool* mask, const int* kinds,
                                      const bool* bits, i64 b, i64 h, i64 row, i64 column,
                                      i64 transposed, Index* indices, Accum* values) {
    p.mask = mask;
    p.block_kinds = kinds;
    p.block_bits = bits;
    if (transposed)
        masked<true>(p, b, h, int(row), int(column), indices, values);
    else
        masked<false>(p, b, h, int(row), int(column), indices, values);
}
