// Layer 3. The bias of a warp's scores. Where its rows are contiguous and aligned, the warp copies
// its share to shared memory of its own, behind what it does in the meantime, and reads it back as
// accumulators; else a lane reads what it needs element by element.
#pragma once

#include "scores.cuh"

// Of MT x NT atoms. Rows are queries in memory; of transposed scores they are the columns.
template <bool TRANSPOSED, int MT, int NT>
struct WarpBias {
    using Share = Tile<BiasElement, TRANSPOSED ? 8 * NT : 16 * MT, TRANSPOSED ? 16 * MT : 8 * NT>;
    static constexpr bool STAGED = BIAS_VECTOR > 0;
    static constexpr int BYTES = STAGED ? WARPS_M * WARPS_N * Share::BYTES : 0;  // of a block

    Share share;

    __device__ explicit WarpBias(char* memory)
        : share(memory + (STAGED ? threadIdx.x / WARP * Share::BYTES : 0)) {}

    // Begin to copy what scores from query i and key j on need. It is there when the thread has
    // waited for its copies, and the warp has met.
    __device__ void load(const Terms& terms, int i, int j) const {
        if constexpr (STAGED) {
            __syncwarp();  // everybody is done with what was there
            share.template load<WARP, BIAS_VECTOR>(terms.bias + i * terms.bias_i + j, terms.bias_i,
                                                   terms.Nq - i, terms.Nk - j, threadIdx.x % WARP);
            copy_commit();
        }
    }

    // Atoms n and n + 1 of row m of atoms, of scores that begin at (row, column).
    __device__ void read(Sum (&x)[2][4], const Terms& terms, int row, int column, int m,
                         int n) const {
        const Lane lane;
        BiasElement own[2][4];
        if constexpr (STAGED) share.template read<TRANSPOSED, 16 * MT>(own, 0, 16 * m, 8 * n);
#pragma unroll
        for (int a = 0; a < 2; ++a)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if constexpr (STAGED) {
                    x[a][e] = Sum(widen(own[a][e]));
                } else {
                    const int r = row + 16 * m + lane.row(e);
                    const int c = column + 8 * (n + a) + lane.column(e);
                    const int i = TRANSPOSED ? c : r, j = TRANSPOSED ? r : c;
                    const Sum near = terms.bias_of(min(i, terms.Nq - 1), min(j, terms.Nk - 1));
                    x[a][e] = i < terms.Nq && j < terms.Nk ? near : Sum(0);
                }
            }
    }

    // Write the gradient at a bias that is not broadcast, and so contiguous, for transposed scores
    // from query i and key j on. What was loaded is lost.
    __device__ void write(BiasElement* dbias, const Terms& terms, int i, int j,
                          const Fragment<Sum, MT, NT>& ds) const {
        static_assert(TRANSPOSED);
        const int rows = terms.Nq - i, columns = terms.Nk - j;
        dbias += i64(i) * terms.Nk + j;
        if constexpr (STAGED) {
            __syncwarp();  // everybody is done with the bias
            store_transposed(share, ds);
            __syncwarp();
            share.template store<WARP, BIAS_VECTOR>(dbias, terms.Nk, rows, columns,
                                                    threadIdx.x % WARP);
        } else {
            const Lane lane;
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int row = 8 * n + lane.column(e), column = 16 * m + lane.row(e);
                        if (row < rows && column < columns)
                            dbias[i64(row) * terms.Nk + column] =
                                narrow<BiasElement>(ds.x[m][n][e]);
                    }
        }
    }
};
