// Layer 3. Accumulators of scores: where each element stands; terms applied, hidden pairs out.
#pragma once

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

    // Call visit(m, half, n, first, second) for every two neighbouring columns of a row with what
    // `data`, of strides (step_i, step_j), holds for them. Beyond (Nq, Nk) nothing is read.
    template <class T, class Visit>
    __device__ void read_pairs(const T* data, i64 step_i, i64 step_j, int Nq, int Nk,
                               Visit visit) const {
        const Lane lane;
        const int rows = TRANSPOSED ? Nk : Nq, columns = TRANSPOSED ? Nq : Nk;
        const i64 down = TRANSPOSED ? step_j : step_i, right = TRANSPOSED ? step_i : step_j;
        struct alignas(2 * sizeof(T)) Two {
            T x, y;
        };
        if constexpr (SPAN > 1 && TRANSPOSED) {
            // Rows are neighbours in memory: what a lane reads of a column has constant distances.
            const int r = row + lane.g;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const int c = column + 8 * n + lane.column(0);
                const T* from = data + c * right + r;
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int step = 16 * m + 8 * half;
                        Two two = {};
                        if (r + step < rows && c < columns) two.x = from[step];
                        if (r + step < rows && c + 1 < columns) two.y = from[right + step];
                        visit(m, half, n, two.x, two.y);
                    }
            }
        } else {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int r = row + 16 * m + lane.row(2 * half), c0 = column + lane.column(0);
                    const T* from = data + min(r, rows - 1) * down;
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        const int c = c0 + 8 * n;
                        Two two = {};
                        if constexpr (SPAN > 1) {
                            if (c < columns) two = *reinterpret_cast<const Two*>(from + c);
                        } else {
                            if (c < columns) two.x = from[c * right];
                            if (c + 1 < columns) two.y = from[(c + 1) * right];
                        }
                        visit(m, half, n, two.x, two.y);
                    }
                }
        }
    }

    // Turn products into scores; look(m, n, e, derivative) is given the derivatives by the scaled
    // product.
    template <class Look>
    __device__ void apply(const Terms& terms, Look look) {
        if constexpr (FOLD) return;
        auto score = [&](int m, int n, int e, Sum added) {
            const Lane lane;
            const int r = row + 16 * m + lane.row(e), c = column + 8 * n + lane.column(e);
            Sum derivative, &s = this->x[m][n][e];
            s = terms.score(s, TRANSPOSED ? c : r, TRANSPOSED ? r : c, added, derivative);
            look(m, n, e, derivative);
        };
        if constexpr (HAS_BIAS)
            read_pairs(terms.bias, terms.bias_i, terms.bias_j, terms.Nq, terms.Nk,
                       [&](int m, int half, int n, BiasElement x, BiasElement y) {
                           score(m, n, 2 * half, Sum(widen(x)));
                           score(m, n, 2 * half + 1, Sum(widen(y)));
                       });
        else
            for_each([&](Sum&, int, int, int m, int n, int e) { score(m, n, e, 0); });
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
                    found[m][e / 2] |= marks[8 * n + lane.column(e)] &&
                                       this->x[m][n][e] != -infinity<Sum>();
    }

    // Zero the elements that dropout takes of 16 columns, the atoms n and n + 1.
    __device__ void drop(const Dropout& dropout, int n) {
        if constexpr (HAS_DROPOUT)
            dropout.for_columns<TRANSPOSED, MT>(
                row, column, n,
                [&](int m, int n, int e, bool kept) { if (!kept) this->x[m][n][e] = 0; });
    }
};
