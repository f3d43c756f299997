// Layer 3. The sums of a row over the splits of its keys, as a warp reads them to join them.
#pragma once

#include "splits.cuh"

constexpr int COLUMNS = VALUE_DIM / WARP;  // columns of a lane, in vectors of VECTOR
constexpr int VECTOR = COLUMNS % 4 == 0 && sizeof(Accum) == 4 ? 4 : COLUMNS % 2 == 0 ? 2 : 1;

struct alignas(VECTOR * sizeof(Accum)) Neighbours {
    Accum values[VECTOR];
};

__device__ inline RowSum sum_of(const Params& p, i64 index) {
    struct alignas(2 * sizeof(Accum)) Pair {
        Accum values[2];
    };
    const Pair pair = static_cast<const Pair*>(p.partial_sums)[index];
    return RowSum::load(pair.values);
}
__device__ inline int column_of(int n, int lane) {
    return (n / VECTOR * WARP + lane) * VECTOR + n % VECTOR;
}

// The statistics of a row over one split, and this lane's columns of its output.
struct Part {
    RowSum sum;
    Neighbours columns[COLUMNS / VECTOR];

    __device__ void load(const Params& p, i64 index, int lane) {
        sum = sum_of(p, index);
        const auto from = reinterpret_cast<const Neighbours*>(
            static_cast<const Accum*>(p.partial_out) + index * VALUE_DIM);
#pragma unroll
        for (int n = 0; n < COLUMNS / VECTOR; ++n) columns[n] = from[n * WARP + lane];
    }
};

// A row, and its splits that have keys: begin to end - 1.
struct SplitRow {
    bool is_there;
    int begin, end;
    i64 first;  // the index of split 0 among the sums
    Accum softmax_scale_log2;
    i64 h, lse_index;
    Element* out;

    __device__ SplitRow(const Params& p, int number) {
        const int rows = PACKED ? PACKED_ROWS : int(p.group * p.Nq), r = number % rows;
        const int kv = number / rows % int(p.Hkv), b = number / rows / int(p.Hkv);
        is_there = b < p.entries;
        if (!is_there) return;
        const SharedRow row(p, kv, r);
        const Sequence sequence(p, b);
        const int own_rows = int(p.group * sequence.Nq);
        is_there = !PACKED || (r < own_rows && own_rows <= PACKED_ROWS);
        if (!is_there) return;
        const Range keys = SlidingWindow(p, sequence).key_range(row.i, row.i + 1);
        begin = keys.lo / int(p.split_keys), end = (keys.hi + int(p.split_keys) - 1) / int(p.split_keys);
        first = partial_index(p, sequence, kv, r, 0);
        softmax_scale_log2 = ScoreMod(p, b, row.h).softmax_scale_log2();
        h = row.h, lse_index = ::lse_index(p, sequence, row), out = out_row(p, sequence, row);
    }
};
