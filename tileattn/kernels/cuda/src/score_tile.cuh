// Layer 3. Fragments of scores: the query and key of each element, score modifiers, masks and dropout.
#pragma once

#include "bias.cuh"
#include "dense_mask.cuh"
#include "philox.cuh"
#include "score_mod.cuh"

// MT x NT atoms of scores. Rows are queries, or keys if TRANSPOSED.
template <bool TRANSPOSED, int MT, int NT>
struct Scores : Fragment<Accum, MT, NT> {
    int row, column;  // of the fragment's first element

    __device__ Scores(int row, int column) : row(row), column(column) { this->clear(); }

    // Call visit(element, i, j, m, n, e) for every element of this lane, in the columns of atoms begin to
    // end - 1. The element belongs to query i and key j.
    template <class Visit>
    __device__ void for_each(Visit visit, int begin = 0, int end = NT) {
        const Lane lane;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = begin; n < end; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int r = row + 16 * m + lane.row(e), c = column + 8 * n + lane.column(e);
                    visit(this->x[m][n][e], TRANSPOSED ? c : r, TRANSPOSED ? r : c, m, n, e);
                }
    }

    // Apply the score modifiers to Q K^T. record(m, n, e, dsoftcap, dfunction) gets their derivatives.
    template <class Bias, class Record>
    __device__ void apply(const ScoreMod& score_mod, const Bias& bias, Record record, int begin = 0,
                          int end = NT) {
        if constexpr (FOLD) return;
        if (HAS_SOFTCAP && IS_16_BIT && all_near(score_mod, begin, end))
            modify<true>(score_mod, bias, record, begin, end);
        else
            modify<false>(score_mod, bias, record, begin, end);
    }

    template <bool IS_NEAR, class Bias, class Record>
    __device__ void modify(const ScoreMod& score_mod, const Bias& bias, Record record, int begin,
                           int end) {
        Accum added[2][4];
        auto visit = [&](Accum& s, int i, int j, int m, int n, int e) {
            if (HAS_BIAS && n % 2 == 0 && e == 0) bias.read(added, score_mod, row, column, m, n);
            Accum dsoftcap, dfunction;
            s = score_mod.template score<IS_NEAR>(s, i, j, added[n % 2][e], dsoftcap, dfunction);
            record(m, n, e, dsoftcap, dfunction);
        };
#pragma unroll
        for (int n = begin; n < end; n += 2) for_each(visit, n, n + 2);
    }

    // True if all arguments of tanh in a warp are small enough for the polynomial. One vote for all
    // elements, since each vote has latency. Four maxima, since a single one would be a long dependency
    // chain.
    __device__ bool all_near(const ScoreMod& score_mod, int begin, int end) {
        Accum farthest[4] = {};
        auto visit = [&](Accum& s, int, int, int, int, int e) {
            farthest[e] = fmax(farthest[e], fabs(s));
        };
        for_each(visit, begin, end);
        const Accum all = fmax(fmax(farthest[0], farthest[1]), fmax(farthest[2], farthest[3]));
        const bool near = all * fabs(score_mod.scale_over_cap) < TANH_NEAR;
        return __all_sync(~0u, near);
    }

    __device__ void masked_fill(const AttentionMask& attn_mask,
                                const DenseMask<TRANSPOSED, MT, NT>& dense) {
        // With a dense mask most partial tiles lie inside the window, which then masks nothing.
        const bool inside =
            HAS_MASK && !HAS_BLOCK_MASK && !HAS_MASK_MOD &&
            (TRANSPOSED ? attn_mask.window.is_full(column, column + 8 * NT, row, row + 16 * MT)
                        : attn_mask.window.is_full(row, row + 16 * MT, column, column + 8 * NT));
        if (!inside) masked_fill_positions(attn_mask);
        if constexpr (HAS_MASK) masked_fill(dense);
    }
    __device__ void masked_fill(const DenseMask<TRANSPOSED, MT, NT>& dense) {
        dense.for_each([&](int m, int half, int n, int e, bool visible) {
            if (!visible) this->x[m][n][2 * half + e] = -infinity<Accum>();
        });
    }

    // A lane has two neighbouring columns of each atom. Return a bit for each column of 16 atoms: it is
    // below the limit, which counts from the lane's first column.
    __device__ static u32 columns_below(int limit) {
        const int count = max(2 * (limit >> 3) + min(limit & 7, 2), 0);
        u32 beyond;
        asm("shl.b32 %0, -1, %1;" : "=r"(beyond) : "r"(count));  // by 32 or more it gives 0
        return ~beyond;
    }

    // Apply the window, the block mask and mask_mod. The bits of 16 atoms become predicates, seven with one
    // instruction (R2P). Comparing each column would take twice as many instructions.
    __device__ void masked_fill_positions(const AttentionMask& attn_mask, int begin = 0,
                                          int end = NT) {
        const Lane lane;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // The window of a row is one range of columns.
                const int c0 = column + lane.column(0);
                const int r = attn_mask.query(row + 16 * m + lane.row(2 * half));
                const Range attended = TRANSPOSED ? attn_mask.window.query_range(r, r + 1)
                                                  : attn_mask.window.key_range(r, r + 1);
#pragma unroll
                for (int first = begin; first < end; first += 16) {
                    const int c1 = c0 + 8 * first;
                    u32 visible =
                        columns_below(attended.hi - c1) & ~columns_below(attended.lo - c1);
                    if constexpr (HAS_BLOCK_MASK) {
                        u32 in_blocks = 0;
#pragma unroll 4
                        for (int bit = 0; bit < min(32, 2 * (end - first)); ++bit) {
                            const int c = c1 + 8 * (bit / 2) + bit % 2;
                            const bool inside = TRANSPOSED ? attn_mask.in_blocks(c, r)
                                                           : attn_mask.in_blocks(r, c);
                            in_blocks |= u32(inside) << bit;
                        }
                        visible &= in_blocks;
                    }
#pragma unroll
                    for (int bit = 0; bit < 32; ++bit) {
                        if (first + bit / 2 >= end) break;
                        const int c = c1 + 8 * (bit / 2) + bit % 2;
                        bool attends = visible >> bit & 1;
                        // No branch, so that the compiler shares work between elements.
                        if constexpr (HAS_MASK_MOD)
                            attends = attends & (TRANSPOSED ? attn_mask.by_function(c, r)
                                                            : attn_mask.by_function(r, c));
                        if (!attends)
                            this->x[m][first + bit / 2][2 * half + bit % 2] = -infinity<Accum>();
                    }
                }
            }
    }

    // Zero the dropped elements of atoms n and n + 1 (16 columns), and call record(m, n, e) for each.
    template <class Record>
    __device__ void drop(const Dropout& dropout, int n, Record record) {
        if constexpr (HAS_DROPOUT)
            dropout.for_columns<TRANSPOSED, MT>(row, column, n,
                                                [&](int m, int n, int e, bool kept) {
                                                    if (kept) return;
                                                    this->x[m][n][e] = 0;
                                                    record(m, n, e);
                                                });
    }
    __device__ void drop(const Dropout& dropout, int n) {
        drop(dropout, n, [](int, int, int) {});
    }
};
