// Layer 2. Accumulator fragments of a warp: GEMMs of tiles, and stores to tiles and global memory.
#pragma once

#include "tile.cuh"

// An accumulator fragment of MT x NT atoms: 16 * MT rows, 8 * NT columns.
template <class S, int MT, int NT>
struct Fragment {
    S x[MT][NT][4];

    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[m][n][e] = 0;
    }

    // True if the first ELEMENTS of each atom are finite: 0 times NaN or infinity is not 0. The test has no branches.
    // It has several sums, since a single one would be a long dependency chain.
    template <int ELEMENTS = 4, int CHAINS = 4>
    __device__ bool all_finite() const {
        S zeros[CHAINS] = {};
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < ELEMENTS; ++e)
                    zeros[e % CHAINS] = fma(x[m][n][e], S(0), zeros[e % CHAINS]);
        S sum = zeros[0];
#pragma unroll
        for (int n = 1; n < CHAINS; ++n) sum += zeros[n];
        return sum == 0;
    }

    __device__ void scale(S factor) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[m][n][e] *= factor;
    }

    // Scale each row by its factor. Skipped if all factors of the warp are 1.
    __device__ void scale_rows(const S (&factors)[MT][2]) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
            if (!__all_sync(~0u, factors[m][0] == 1 && factors[m][1] == 1))
                scale_rows(m, factors[m]);
    }
    __device__ void scale_rows(int m, const S (&factors)[2]) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[m][n][e] *= factors[e / 2];
    }
};

// GEMMs of a warp's part of C, at (m0, n0): m0 is a multiple of 16 * MT, n0 of 8 * NT.

// C += X Y^T, for DEPTH columns of both tiles. With MIRRORED it has the bits of Y X^T without MIRRORED.
// NAN_SAFE: see mma.cuh.
template <int DEPTH, int UNROLL = DEPTH / 16, bool MIRRORED = false, bool NAN_SAFE = false, class T,
          int R, int C, int R2, int C2, class S, int MT, int NT>
__device__ inline void multiply(Fragment<S, MT, NT>& c, const Tile<T, R, C>& x, int m0,
                                const Tile<T, R2, C2>& y, int n0) {
#pragma unroll UNROLL
    for (int k = 0; k < DEPTH; k += 16) {
        typename Atom<T>::A a[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) a[m] = x.a(m0, 16 * m, k);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            typename Atom<T>::B b[2];
            y.b(b, n0, 8 * n, k);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    Atom<T>::template mma<MIRRORED, NAN_SAFE>(c.x[m][n + i], a[m], b[i]);
        }
    }
}

struct Nothing {
    template <class... Steps>
    __device__ void operator()(Steps...) const {}
};

// C += X Y: X is a fragment, Y a tile from column n0 on. prepare(k) is called before atoms k and k + 1 of X
// are read.
template <class T, int R, int C, class S, int MT, int KT, int NT, class Prepare = Nothing>
__device__ inline void multiply(Fragment<S, MT, NT>& c, const Fragment<S, MT, KT>& x,
                                const Tile<T, R, C>& y, int n0, Prepare prepare = {}) {
#pragma unroll
    for (int k = 0; k < 8 * KT; k += 16) {
        prepare(k / 8);
        typename Atom<T>::A a[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) a[m] = Atom<T>::a_of(x.x[m] + k / 8);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            typename Atom<T>::B b[2];
            y.template b_transposed<8 * NT, true>(b, n0, 8 * n, k);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) Atom<T>::mma(c.x[m][n + i], a[m], b[i]);
        }
    }
}

// C += X^T Y (TRANSPOSED) or X Y, for DEPTH rows of Y. beside(step, steps) is issued with
// each step.
template <bool TRANSPOSED, int DEPTH, int UNROLL = DEPTH / 16, class T, int R, int C, int R2,
          int C2, class S, int MT, int NT, class Beside = Nothing>
__device__ inline void multiply_rows(Fragment<S, MT, NT>& c, const Tile<T, R, C>& x, int m0,
                                     const Tile<T, R2, C2>& y, int n0, Beside beside = {}) {
#pragma unroll UNROLL
    for (int k = 0; k < DEPTH; k += 16) {
        typename Atom<T>::A a[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m)
            a[m] =
                TRANSPOSED ? x.template a_transposed<16 * MT>(m0, 16 * m, k) : x.a(m0, 16 * m, k);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            typename Atom<T>::B b[2];
            y.template b_transposed<8 * NT>(b, n0, 8 * n, k);
            beside((k / 16 * NT + n) / 2, DEPTH / 16 * NT / 2);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) Atom<T>::mma(c.x[m][n + i], a[m], b[i]);
        }
    }
}

// Store a fragment to a tile, in its element type.
template <class T, int R, int C, class S, int MT, int NT>
__device__ inline void store_fragment(const Tile<T, R, C>& tile, const Fragment<S, MT, NT>& c,
                                      int m0, int n0) {
    const Lane lane;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; e += 2)
                tile.pair(Tile<T, R, C>::template at<8 * NT>(m0 + lane.g, n0 + 2 * lane.t,
                                                             16 * m + 4 * e, 8 * n)) = {
                    narrow<T>(c.x[m][n][e]), narrow<T>(c.x[m][n][e + 1])};
}

// Store a fragment to global memory, in the element type of the target: `rows` rows of `columns` elements.
template <int ALIGNMENT_BYTES, class T, class S, int MT, int NT>
__device__ inline void store_rows(T* target, i64 stride, const Fragment<S, MT, NT>& c, int m0, int n0,
                                  int rows, int columns) {
    const Lane lane;
    using Pair = typename Tile<T, 16, 16>::Pair;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const int row = m0 + 16 * m + lane.row(e);
            T* const to = target + row * stride;
            if (row >= rows) continue;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const int column = n0 + 8 * n + lane.column(0);
                const Pair pair{narrow<T>(c.x[m][n][e]), narrow<T>(c.x[m][n][e + 1])};
                if (ALIGNMENT_BYTES % sizeof(Pair) == 0 && column + 1 < columns) {
                    *reinterpret_cast<Pair*>(to + column) = pair;
                } else {
                    if (column < columns) to[column] = pair.x;
                    if (column + 1 < columns) to[column + 1] = pair.y;
                }
            }
        }
}

// Store a fragment transposed, to a tile that it fills.
template <class T, int R, int C, class S, int MT, int NT>
__device__ inline void store_transposed(const Tile<T, R, C>& tile, const Fragment<S, MT, NT>& c) {
    static_assert(R == 8 * NT && C == 16 * MT);
    const Lane lane;
    const int thread = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            auto at = [&](int row, int column) {
                return Tile<T, R, C>::template at<C>(row, column, 8 * n, 16 * m);
            };
            if constexpr (sizeof(T) == 2) {
                u32 r[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const S* two = c.x[m][n + i / 2] + i % 2 * 2;
                    r[i] = pack<T>(float(two[0]), float(two[1]));
                }
                store_matrices_transposed(
                    tile.address + at(thread % 8 + thread / 16 * 8, thread / 8 % 2 * 8), r);
            } else {
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        tile.element(at(2 * lane.t + e % 2 + 8 * i, lane.g + e / 2 * 8)) =
                            narrow<T>(c.x[m][n + i][e]);
            }
        }
}

// Where add_rows stores a column in dQ_accum. With 4-byte numbers, a lane's elements of two neighbouring
// atoms are contiguous (one 16-byte add). With 8-byte numbers, the elements that the four lanes of a row
// add at a time are: the L2 cache adds in sectors of 32 bytes.
template <class S>
__device__ inline int accum_column(int column) {
    const int lane = column % 8 / 2, e = column % 2;
    if (sizeof(S) == 8) return column / 8 * 8 + 4 * e + lane;
    return column / 16 * 16 + lane * 4 + column % 16 / 8 * 2 + e;
}

// Where stage_dq of gemm_sm90.cuh stores a column of this row: in neighbouring rows a column is in other
// banks.
__device__ inline int dq_column(int row, int column) { return column ^ row % 2 * 16; }

// Where stage_transposed_dq stores a column: columns c and c + 8 of 16 are neighbours.
__device__ inline int transposed_dq_column(int row, int column) {
    return (column / 16 * 16 + column % 8 * 2 + column / 8 % 2) ^ row / 2 % 4 * 8;
}

// Add a fragment to the first `rows` rows in global memory, or only part `part` of `parts` of its rows.
template <class S, int MT, int NT>
__device__ inline void add_rows(S* target, int stride, const Fragment<S, MT, NT>& c, int m0, int n0,
                                int rows, int part = 0, int parts = 1) {
    const Lane lane;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            if ((2 * m + e / 2) * parts / (2 * MT) != part) continue;
            const int row = m0 + 16 * m + lane.row(e);
            S* const to = target + row * stride + n0 + accum_column<S>(lane.column(0));
            if (row < rows)
#pragma unroll
                for (int n = 0; n < NT; n += 2) {
                    const S(&x)[4] = c.x[m][n], (&y)[4] = c.x[m][n + 1];
                    if constexpr (sizeof(S) == 4)
                        add_global(to + 8 * n, x[e], x[e + 1], y[e], y[e + 1]);
                    else
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            atomicAdd(to + 8 * n + 4 * i, x[e + i]),
                                atomicAdd(to + 8 * n + 8 + 4 * i, y[e + i]);
                }
        }
}
