// Layer 3. Few queries over many keys: the rows that share keys, the splits that keys are cut into,
// where keys lie, and how the sums over splits are joined. Dao et al., Flash-Decoding, 2023.
#pragma once

#include "head.cuh"

// The rows that share the keys of a key head: those of a query are neighbours, one for each query
// head of the group.
struct SharedRow {
    int i, h;

    __device__ SharedRow(const Params& p, int kv, int row)
        : i(row / int(p.group)), h(kv * int(p.group) + row % int(p.group)) {}
};

// Where the sums of a row over a split lie among those of all. Packed sequences are not cut.
__device__ inline i64 partial_index(const Params& p, i64 b, i64 kv, int row, int split) {
    return ((b * p.Hkv + kv) * p.group * p.Nq + row) * p.splits + split;
}

// Keys of a sequence: in the pages that its table has, or in one batch entry. Of the next keys each
// lane finds one.
struct KeyRows {
    Integers table;  // of the pages of all
    i64 first;       // of its own
    int b, last, page, pages;
    int found_page = 0, found_row = 0;

    __device__ KeyRows(const Params& p, int b, int length)
        : table{p.block_table, p.block_table_bytes},
          first(b * p.table_width),
          b(b),
          last(max(length - 1, 0)),
          page(int(p.page)),
          pages(int(p.pages_total)) {}

    // Nobody has seen entries that are on the device: whatever they say, the page is one of those
    // that there are.
    __device__ void find(int j) {
        if constexpr (PAGED) {
            const int key = min(j, last);
            found_page = int(min(max(table[first + key / page], i64(0)), i64(pages - 1)));
            found_row = key % page;
        }
    }
    // The row of a key, which is that of another lane. All lanes of a warp call.
    __device__ const Element* row(const Element* first, const Rows& at, int j, int lane) const {
        const i64 entry = PAGED ? __shfl_sync(~0u, found_page, lane) : b;
        const i64 within = PAGED ? __shfl_sync(~0u, found_row, lane) : j;
        return first + entry * at.b + within * at.n;
    }
};

// The softmax of one row over some keys, but for its division: the shift, in units of log 2 or, of a
// large row, of scores, and the sum. As in RowState.
struct RowSum {
    Accum m = -infinity<Accum>(), l = 0;
    bool max_first = ALL_ROWS_MAX_FIRST;

    __device__ bool is_empty() const { return l == 0; }

    // By how many units of log 2 its shift exceeds another.
    __device__ Accum above(const RowSum& other, Accum softmax_scale_log2) const {
        if (max_first != other.max_first)
            return max_first ? fma(m, softmax_scale_log2, -other.m)
                         : -fma(other.m, softmax_scale_log2, -m);
        return max_first ? difference(m, other.m) * softmax_scale_log2 : difference(m, other.m);
    }
    // The one with the larger shift.
    __device__ void raise(const RowSum& other, Accum softmax_scale_log2) {
        if (other.is_empty()) return;
        if (is_empty() || other.above(*this, softmax_scale_log2) > 0) *this = other;
    }
    // What sums of this shift are multiplied by, where they join those of a larger one.
    __device__ Accum factor(const RowSum& largest, Accum softmax_scale_log2) const {
        return is_empty() ? Accum(0) : exp2_of(above(largest, softmax_scale_log2));
    }

    // As two numbers: the sum of a large row is negative.
    __device__ void store(Accum* to) const { to[0] = m, to[1] = max_first ? -l : l; }
    __device__ static RowSum load(const Accum* from) {
        RowSum sum;
        sum.m = from[0], sum.l = fabs(from[1]), sum.max_first = ALL_ROWS_MAX_FIRST || from[1] < 0;
        return sum;
    }

    // What normalises the row, with its sink; one thread of the row writes lse.
    __device__ Accum finish(const Params& p, i64 lse_index, i64 h,
                            bool writes = threadIdx.x % WARP == 0) const {
        RowState<1> state;
        state.m[0][0] = m, state.l[0][0] = l, state.max_first = max_first;
        Accum lse;
        const Accum inverse =
            state.finalize(0, 0, sink_of(p, h), Accum(1), Accum(p.softmax_scale), lse);
        if (writes) static_cast<Accum*>(p.lse)[lse_index] = lse;
        return inverse;
    }
};

__device__ inline const Element* q_row(const Params& p, const Sequence& sequence,
                                       const SharedRow& row) {
    return sequence.queries<Element>(p.q, p.q_at, row.h) + row.i * p.q_at.n;
}
__device__ inline Element* out_row(const Params& p, const Sequence& sequence,
                                   const SharedRow& row) {
    return sequence.queries<Element>(p.out, p.out_at, row.h) + row.i * p.out_at.n;
}
__device__ inline i64 lse_index(const Params& p, const Sequence& sequence, const SharedRow& row) {
    return sequence.row(p, row.h) + row.i;
}
