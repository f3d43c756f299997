// Layer 3. Split-KV: the rows that share a key head, rows of keys in pages, and the sums of a row over a
// split and how they are combined. Dao et al., Flash-Decoding, 2023.
#pragma once

#include "head.cuh"

// A row that shares the keys of a key head: query i of query head h. The heads of a query are consecutive
// rows.
struct SharedRow {
    int i, h;

    __device__ SharedRow(const Params& p, int kv, int row)
        : i(row / int(p.group)), h(kv * int(p.group) + row % int(p.group)) {}
};

// The index of a row and a split in partial_out and partial_sums. Packed sequences have PACKED_ROWS rows each, or
// the rows of their tokens if tokens have fewer in all.
__device__ inline i64 partial_index(const Params& p, const Sequence& sequence, i64 kv, int row, int split) {
    i64 place = (sequence.b * p.Hkv + kv) * p.group * p.Nq + row;
    if constexpr (PACKED) {
        const bool by_token = p.partial_rows == p.group * p.Nq;
        place = kv * p.partial_rows +
                (by_token ? p.group * sequence.q_start : sequence.b * PACKED_ROWS) + row;
    }
    return place * p.splits + split;
}

// The rows of the keys of a sequence, in pages or in one batch entry. Each lane looks up the page of one
// key, a tile ahead, since that is slow; the lanes then share what they have found.
struct KeyRows {
    Integers table;  // the block table
    i64 first;       // the sequence's first entry
    i64 entry, start;  // its batch entry, and its first row there
    int last, page, pages;
    int found_page = 0, found_row = 0;

    __device__ KeyRows(const Params& p, const Sequence& sequence, int length)
        : table{p.block_table, p.block_table_bytes},
          first(sequence.b * p.table_width),
          entry(sequence.entry()),
          start(sequence.k_start),
          last(max(length - 1, 0)),
          page(int(p.page)),
          pages(int(p.pages_total)) {}

    // Look up the page of key j. The host has not checked the block table: entries are clamped to existing
    // pages.
    __device__ void find(int j) {
        if constexpr (PAGED) {
            const int key = min(j, last);
            found_page = int(min(max(table[first + key / page], i64(0)), i64(pages - 1)));
            found_row = key % page;
        }
    }
    // The row of key j, which `lane` has looked up. All lanes of a warp call.
    __device__ const KvElement* row(const KvElement* first, const Rows& at, int j, int lane) const {
        const i64 from = PAGED ? __shfl_sync(~0u, found_page, lane) : entry;
        const i64 within = PAGED ? __shfl_sync(~0u, found_row, lane) : start + j;
        return first + from * at.b + within * at.n;
    }
};

// The softmax statistics of one row over some keys, as in RowState: the shift, in units of log 2 (of scores
// if the row is large), and the sum of exponentials.
struct RowSum {
    Accum m = -infinity<Accum>(), l = 0;
    bool max_first = ALL_ROWS_MAX_FIRST;

    __device__ bool is_empty() const { return l == 0; }

    // By how many units of log 2 this shift exceeds another.
    __device__ Accum above(const RowSum& other, Accum softmax_scale_log2) const {
        const Accum mixed = max_first ? fma(m, softmax_scale_log2, -other.m)
                                      : -fma(other.m, softmax_scale_log2, -m);
        const Accum alike = difference(m, other.m) * (max_first ? softmax_scale_log2 : Accum(1));
        return max_first != other.max_first ? mixed : alike;
    }
    // Become the one with the larger shift.
    __device__ void raise(const RowSum& other, Accum softmax_scale_log2) {
        if (other.is_empty()) return;
        if (is_empty() || other.above(*this, softmax_scale_log2) > 0) *this = other;
    }
    // The factor of sums with this shift when they are added to sums with the largest shift.
    __device__ Accum factor(const RowSum& largest, Accum softmax_scale_log2) const {
        return is_empty() ? Accum(0) : exp2_of(above(largest, softmax_scale_log2));
    }

    // Factors of a total, and of the sums over the next keys.
    struct Factors {
        Accum total, next;

        __device__ Accum sum(Accum total, Accum next) const {
            return fma(next, this->next, rounded_product(total, this->total));
        }
    };
    // Add the sums over the next keys to these.
    __device__ Factors add(const RowSum& next, Accum softmax_scale_log2) {
        const Accum above = next.above(*this, softmax_scale_log2);
        const bool rises = !next.is_empty() && (is_empty() || above > 0);
        const Accum factor = exp2_of(rises ? -above : above);  // of the one with the smaller shift
        const Factors factors{is_empty() ? 0 : rises ? factor : Accum(1),
                              next.is_empty() ? 0 : rises ? Accum(1) : factor};
        m = rises ? next.m : m, max_first = rises ? next.max_first : max_first;
        l = factors.sum(l, next.l);
        return factors;
    }

    // Stored as two numbers; the sign of the second marks a large row.
    __device__ void store(Accum* to) const { to[0] = m, to[1] = max_first ? -l : l; }
    __device__ static RowSum load(const Accum* from) {
        RowSum sum;
        sum.m = from[0], sum.l = fabs(from[1]), sum.max_first = ALL_ROWS_MAX_FIRST || from[1] < 0;
        return sum;
    }

    // Return the factor that normalises the row, with its sink. One thread `writes` the lse.
    __device__ Accum finish(const Params& p, i64 lse_index, i64 h,
                            bool writes = threadIdx.x % WARP == 0) const {
        RowState<1> state;
        state.m[0][0] = m, state.l[0][0] = l, state.max_first = max_first;
        Accum lse;
        const Accum inverse =
            state.finalize<INVARIANT>(0, 0, sink_of(p, h), Accum(1), Accum(p.softmax_scale), lse);
        if (writes) static_cast<Accum*>(p.lse)[lse_index] = lse;
        return inverse;
    }
};

// The place of a part among the parts of its work tile. Only kernels with TOTALS have parts.
template <bool>
struct WorkPart {
    static constexpr bool has_total = false;  // there are sums over earlier keys
    static constexpr bool continues = false;  // there are later keys
};
template <>
struct WorkPart<true> {
    bool has_total, continues;
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
