// Layer 3. Accumulators of scores: where each element stands; terms applied, hidden pairs out.
#pragma once

#include "bias.cuh"
#include "dense.cuh"
#include "philox.cuh"
#include "scores.cuh"

// The scores of MT x NT atoms. Rows are queries; in transposed ones they are keys.
template <bool TRANSPOSED, int MT, int NT>
struct Scores : Fragment<Sum, MT, NT> {
    int row, column;  // of the first element of all lanes

    __device__ Scores(int row, int column) : row(row), column(column) { this->clear(); }

    // Call visit(element, i, j, m, n, e) for every element of this lane.
    template <class Visit>
    __device__ void for_each(Visit visit) {
        const Lane lane;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int r = row + 16 * m + lane.row(e), c = column + 8 * n + lane.column(e);
                    visit(this->x[m][n][e], TRANSPOSED ? c : r, TRANSPOSED ? r : c, m, n, e);
                }
    }

    // Turn products into scores; look(m, n, e, derivative) is given the derivatives by the scaled
    // product.
    template <class Look>
    __device__ void apply(const Terms& terms, const WarpBias<TRANSPOSED, MT, NT>& bias,
                          Look look) {
        if constexpr (FOLD) return;
        Sum added[2][4];  // to two atoms at a time
        for_each([&](Sum& s, int i, int j, int m, int n, int e) {
            if (HAS_BIAS && n % 2 == 0 && e == 0) bias.read(added, terms, row, column, m, n);
            Sum derivative;
            s = terms.score(s, i, j, added[n % 2][e], derivative);
            look(m, n, e, derivative);
        });
    }

    __device__ void hide(const Sight& sight, const DenseMask<TRANSPOSED, MT, NT>& mask) {
        // Most tiles that are partial for the mask's sake lie wholly inside the band.
        const bool inside =
            HAS_MASK && !HAS_BLOCK_MASK &&
            (TRANSPOSED ? sight.band.sees_all(column, column + 8 * NT, row, row + 16 * MT)
                        : sight.band.sees_all(row, row + 16 * MT, column, column + 8 * NT));
        if (!inside) hide_by_place(sight);
        if constexpr (HAS_MASK)
            mask.for_each([&](int m, int half, int n, int e, bool visible) {
                if (!visible) this->x[m][n][2 * half + e] = -infinity<Sum>();
            });
    }

    // What the band and the block mask hide.
    __device__ void hide_by_place(const Sight& sight) {
        const Lane lane;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // What a row sees of the band is one range of columns.
                const int r = row + 16 * m + lane.row(2 * half), c0 = column + lane.column(0);
                const Range seen =
                    TRANSPOSED ? sight.band.queries_of(r, r + 1) : sight.band.keys_of(r, r + 1);
                const int lo = seen.lo - c0, hi = seen.hi - c0;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int c = 8 * n + e;
                        bool visible = c >= lo && c < hi;
                        if constexpr (HAS_BLOCK_MASK)
                            visible = visible && (TRANSPOSED ? sight.in_blocks(c0 + c, r)
                                                             : sight.in_blocks(r, c0 + c));
                        if (!visible) this->x[m][n][2 * half + e] = -infinity<Sum>();
                    }
            }
    }

    // Say of each row whether it sees a column that is marked; marks begin with the first column.
    __device__ void find(const bool* marks, bool (&found)[MT][2]) const {
        const Lane lane;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    found[m][e / 2] |= marks[8 * n + lane.column(e)] &
                                       (this->x[m][n][e] != -infinity<Sum>());
    }

    // Zero the elements that dropout takes of 16 columns, the atoms n and n + 1, and call
    // look(m, n, e) for each.
    template <class Look>
    __device__ void drop(const Dropout& dropout, int n, Look look) {
        if constexpr (HAS_DROPOUT)
            dropout.for_columns<TRANSPOSED, MT>(row, column, n,
                                                [&](int m, int n, int e, bool kept) {
                                                    if (kept) return;
                                                    this->x[m][n][e] = 0;
                                                    look(m, n, e);
                                                });
    }
    __device__ void drop(const Dropout& dropout, int n) {
        drop(dropout, n, [](int, int, int) {});
    }
};
