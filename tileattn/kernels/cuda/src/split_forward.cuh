// Layer 3. The operands of a warp in the forward pass if float32 is split (split_gemm.cuh): queries in registers, keys
// and values in tiles of planes.
#pragma once

#include "head.cuh"
#include "planes.cuh"
#include "ptxas.cuh"
#include "split_gemm.cuh"

// 16 * MT queries. Without SPLIT there is nothing.
template <bool SPLIT, int MT>
struct SplitForward {
    __device__ SplitForward(const Params&, const Head&, int) {}
};

template <int MT>
struct SplitForward<true, MT> {
    const Params& p;
    HeadPlanes planes;
    SplitOperand<HEAD_DIM / 16> queries[MT];
    float q_inverse[MT][2], farthest = 0;  // the largest inverse factor of a tile of keys

    // Load and split the queries from `row` on, each with its own factor.
    __device__ SplitForward(const Params& p, const Head& head, int row)
        : p(p), planes(HeadPlanes::of_keys(p, head.sequence, int(head.h) / int(p.group))) {
        const Lane lane;
        const float* const q = head.sequence.template queries<float>(p.q, p.q_at, head.h);
#pragma unroll
        for (int m = 0; m < MT; ++m)
            split_own_rows<HEAD_DIM / 16>(
                [&](int k, int i) {
                    const int own = row + 16 * m + lane.row(2 * (i % 2)), columns = own < head.Nq() ? int(p.D) : 0;
                    return load_pair(q + own * p.q_at.n, 16 * k + i / 2 * 8 + 2 * lane.t, columns);
                },
                q_inverse[m], [&](int k, const Atom<float16>::A& high, const Atom<float16>::A& low) {
                    queries[m].high[k] = high, queries[m].low[k] = low;
                });
    }

    // Start to copy the rows from `row` on to a tile. Rows from `end` on become zero.
    template <class Tile>
    __device__ void load_keys(const Tile& tile, int row, int end) const {
        planes.load(tile, p.k_planes, row, end);
    }
    template <class Tile>
    __device__ void load_values(const Tile& tile, int row, int end) const {
        planes.load(tile, p.v_planes, row, end);
    }

    // Q K^T for the tile of keys that begins at `row`.
    template <class Scores, class Tile>
    __device__ void multiply_keys(Scores& s, const Tile& k, int row) {
        const float k_inverse = planes.inverse(p.k_factors, row);
        farthest = maximum_or_nan(farthest, k_inverse);
        float inverse[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
            inverse[m][0] = q_inverse[m][0] * k_inverse, inverse[m][1] = q_inverse[m][1] * k_inverse;
        split_multiply(s, queries, k, inverse);
    }

    // Add P V. drop(n) drops elements of atoms n and n + 1 of P.
    template <class Sums, int NT, class Tile, class Drop>
    __device__ void add_values(Sums& sums, Scores<false, MT, NT>& probs, const Tile& v, int row, Drop drop) const {
        SplitOperand<NT / 2> operands[MT];
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            drop(n);
#pragma unroll
            for (int m = 0; m < MT; ++m) operands[m].split(probs, {1, 1}, n, n + 2, m);
        }
        const float one = planes.inverse(p.v_factors, row);
        float inverse[MT][2];
#pragma unroll
        for (auto& rows : inverse) rows[0] = rows[1] = one;
        split_multiply_add(sums, operands, v, inverse);
    }

    // True if the scores of all queries of a lane keep their digits.
    __device__ bool keeps_digits() const {
        bool all = true;
#pragma unroll
        for (const auto& rows : q_inverse)
#pragma unroll
            for (const float& inverse : rows) all = all && ::keeps_digits(p, inverse, farthest);
        return all;
    }
};
