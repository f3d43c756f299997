// Merge results over disjoint sets of keys: `RowState.merge` of all parts at once. A few threads take a row.
#include "partial_rows.cuh"

constexpr int MAX_PARTS = 8, AXES = 4;
constexpr int WIDTH = ALIGNMENT_BYTES / int(sizeof(Element));
struct alignas(ALIGNMENT_BYTES) Columns {
    Element x[WIDTH];
};

// Lengths of the axes of rows, or strides along them in elements. Columns are contiguous.
struct RowAxes {
    i64 axes[AXES];

    __device__ i64 offset(const u32 (&index)[AXES]) const {
        i64 sum = 0;
#pragma unroll
        for (int a = 0; a < AXES; ++a) sum += index[a] * axes[a];
        return sum;
    }
};

// merged_rows.py has the same fields. Each has 8 bytes. The results are contiguous, and have fewer than 2^31
// rows.
struct MergeParams {
    const Element* outs[MAX_PARTS];
    const Accum* lses[MAX_PARTS];
    Element* out;
    Accum* lse;
    RowAxes outs_at[MAX_PARTS], lses_at[MAX_PARTS], sizes;
    i64 parts, rows, columns, row_threads;
};

// Merge the columns of a row from `first` on, `step` apart. A part that the call lacks, up to PARTS, counts as
// one without keys.
template <int PARTS>
__device__ inline void merge_row(const MergeParams& p, u32 row, int first, int step) {
    u32 index[AXES], rest = row;
#pragma unroll
    for (int a = AXES - 1; a >= 0; --a) {
        index[a] = rest % u32(p.sizes.axes[a]);
        rest /= u32(p.sizes.axes[a]);
    }
    const Element* outs[PARTS];
    Accum lses[PARTS];
#pragma unroll
    for (int t = 0; t < PARTS; ++t) {
        outs[t] = p.outs[t] + p.outs_at[t].offset(index);
        lses[t] = t < p.parts ? p.lses[t][p.lses_at[t].offset(index)] : -infinity<Accum>();
    }
    auto columns = [&](int t, i64 c) {
        return t < p.parts ? *reinterpret_cast<const Columns*>(outs[t] + c) : Columns();
    };
    // With few parts, columns are loaded before the weights are known.
    constexpr bool AHEAD = PARTS <= 2;
    Columns parts[PARTS];
    auto load = [&](i64 c) {
#pragma unroll
        for (int t = 0; t < PARTS; ++t) parts[t] = columns(t, c);
    };
    if (AHEAD && first < p.columns) load(first);
    Accum m = -infinity<Accum>();
#pragma unroll
    for (int t = 0; t < PARTS; ++t) m = lses[t] > m || lses[t] != lses[t] ? lses[t] : m;  // NaN stays
    const Accum shift = clip_finite(m);
    Accum weights[PARTS], l = 0;
#pragma unroll
    for (int t = 0; t < PARTS; ++t) {
        weights[t] = exp(lses[t] - shift);
        l += weights[t];
    }
    const Accum inverse = l == 0 ? Accum(0) : Accum(1) / l;
    if (first == 0) p.lse[row] = m + log(l);
    for (i64 c = first; c < p.columns; c += step) {
        Accum sums[WIDTH] = {};
#pragma unroll
        for (int t = 0; t < PARTS; ++t) {
            const Columns part = AHEAD ? parts[t] : columns(t, c);
#pragma unroll
            for (int e = 0; e < WIDTH; ++e) sums[e] += weighted(weights[t], widen(part.x[e]), lses[t]);
        }
        Columns result;
#pragma unroll
        for (int e = 0; e < WIDTH; ++e) result.x[e] = narrow<Element>(sums[e] * inverse);
        *reinterpret_cast<Columns*>(p.out + row * p.columns + c) = result;
        if (AHEAD && c + step < p.columns) load(c + step);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    merge_rows(const __grid_constant__ MergeParams p) {
    const int row_threads = int(p.row_threads), own = int(threadIdx.x) / row_threads;
    const i64 row = blockIdx.x * i64(THREADS / row_threads) + own;
    if (own >= THREADS / row_threads || row >= p.rows) return;
    const int first = int(threadIdx.x) % row_threads * WIDTH, step = row_threads * WIDTH;
    if (p.parts <= 2)  // as in a cascade; the code is shorter
        merge_row<2>(p, u32(row), first, step);
    else
        merge_row<MAX_PARTS>(p, u32(row), first, step);
}
