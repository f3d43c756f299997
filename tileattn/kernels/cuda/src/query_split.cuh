// Layer 3. Splits of the queries of a key block. If a key head has few key blocks, several work tiles share
// each block: every split has some of the query heads, and some of the queries. query_split_sums.cuh joins
// their parts of dK and dV.
#pragma once

#include "mask.cuh"

static_assert(!(SPLIT_Q && (PACKED || PAIR)), "not for packed sequences, nor for pairs of CTAs");

// The number of work tiles that share a key block.
__device__ inline int split_count(const Params& p) {
    return SPLIT_Q ? int(p.head_splits * p.query_splits) : 1;
}

// The query heads of a work tile, counted in the group that shares a key head: all, or some if the queries
// are split.
template <bool>
struct QuerySplit {
    static constexpr int split = 0;

    QuerySplit() = default;
    __device__ QuerySplit(const Params&, int) {}
    __device__ int begin() const { return 0; }
    __device__ int end(const Params& p) const { return int(p.group); }
    __device__ Range clip(const Params&, Range queries) const { return queries; }
};
template <>
struct QuerySplit<true> {
    int split, first_head;

    QuerySplit() = default;
    __device__ QuerySplit(const Params& p, int split)
        : split(split), first_head(split % int(p.head_splits) * int(p.split_heads)) {}
    __device__ int begin() const { return first_head; }
    __device__ int end(const Params& p) const { return min(first_head + int(p.split_heads), int(p.group)); }

    // The part of some queries that is in the split: whole tiles.
    __device__ Range clip(const Params& p, Range queries) const {
        const int tiles = block_count<BLOCK_Q>(p, p.Nq), parts = int(p.query_splits);
        const int part = split / int(p.head_splits), begin = part * tiles / parts * BLOCK_Q;
        const int lo = max(queries.lo, begin);
        const int hi = min(queries.hi, (part + 1) * tiles / parts * BLOCK_Q);
        return lo < hi ? Range{lo, hi} : Range{begin, begin};  // no tile, if there is no query
    }
};
