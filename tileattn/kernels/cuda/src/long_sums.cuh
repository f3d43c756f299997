// Layer 3. Sums of split float32 over many tiles.
#pragma once

#include "softmax.cuh"

// Sums over many tiles lose digits: each addition rounds the whole sum. So the sums over GROUP_TILES tiles go to a
// total, which is kept where the results will be. A thread reads only what it has stored.
constexpr int GROUP_TILES = 64;

// Where the results of a warp go, from its first row on: 16 rows for each row tile.
struct ResultRows {
    Element* first;
    i64 stride;
    int rows, columns;

    // Add the total, times a factor, to the sums of one of a lane's two rows of row tile m.
    template <int MT, int NT>
    __device__ void add_total(Fragment<Accum, MT, NT>& sums, int m, int half, Accum factor) const {
        for_each<8>(sums, m, half, true, [&](Accum& sum, Accum total, volatile Element&, bool) {
            sum = fma(total, factor, sum);
        });
    }
    // Add the sums of such a row to the total, times a factor. Without a total the sums become the total. Then set the
    // sums to zero.
    template <int MT, int NT>
    __device__ void add_to_total(Fragment<Accum, MT, NT>& sums, int m, int half, Accum factor,
                                 bool has_total) const {
        for_each<2>(sums, m, half, has_total, [&](Accum& sum, Accum total, volatile Element& at, bool inside) {
            if (inside) at = fma(total, factor, sum);
            sum = 0;
        });
    }
    template <int NT>
    __device__ void store(const Fragment<Accum, 1, NT>& sums) const {
        store_rows<ALIGNMENT_BYTES>(first, stride, sums, 0, 0, rows, columns);
    }

  private:
    // Call visit(sum, total, address of the total, whether the element is inside) for each element of a row. Load the
    // totals of PAIRS pairs at a time. More loads would spill registers in the loops over tiles. The totals are
    // volatile, so that ptxas does not start more loads.
    template <int PAIRS, int MT, int NT, class Visit>
    __device__ void for_each(Fragment<Accum, MT, NT>& sums, int m, int half, bool has_total, Visit visit) const {
        const Lane lane;
        const int row = 16 * m + lane.row(2 * half);
        if (row >= rows) return;
        volatile Element* const target = first + row * stride;
#pragma unroll
        for (int n0 = 0; n0 < NT; n0 += PAIRS) {
            Accum total[PAIRS][2] = {};
            auto for_each_pair = [&](auto use) {
#pragma unroll
                for (int n = n0; n < n0 + PAIRS && n < NT; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) use(n, e, 8 * n + lane.column(e), total[n - n0][e]);
            };
            for_each_pair([&](int, int, int column, Accum& x) {
                if (has_total && column < columns) x = target[column];
            });
            for_each_pair([&](int n, int e, int column, Accum x) {
                visit(sums.x[m][n][2 * half + e], x, target[column], column < columns);
            });
        }
    }
};

// The sums of gradients over tiles of BLOCK rows. A group has 4,096 rows, or more if several tiles begin together.
template <int BLOCK>
struct LongGradient {
    static constexpr int GROUP = GROUP_TILES * 64 / BLOCK;
    int tiles = 0;  // of this group
    bool has_total = false;

    // Before `count` tiles. visit(add) calls add(sums, where they go) for each gradient.
    template <class Visit>
    __device__ __forceinline__ void begin_tiles(int count, Visit visit) {
        if (tiles >= GROUP) {
            visit([&](auto& sums, const ResultRows& total) {
#pragma unroll
                for (int half = 0; half < 2; ++half) total.add_to_total(sums, 0, half, 1, has_total);
            });
            has_total = true, tiles = 0;
        }
        tiles += count;
    }
    // After all tiles.
    template <int NT>
    __device__ __forceinline__ void end(Fragment<Accum, 1, NT>& sums, const ResultRows& total) const {
        if (!has_total) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) total.add_total(sums, 0, half, 1);
    }
};

// The results of the forward pass. The total of `out` is kept in `out`, and the total of P in `lse`.
struct RowResults {
    ResultRows out;
    Accum* lse;
};
template <int MT>
struct LongSums {
    Accum factor[MT][2];  // for the total: shifts have risen

    __device__ LongSums() {
#pragma unroll
        for (auto& row : factor) row[0] = row[1] = 1;
    }
    __device__ void scale(const Accum (&rescale)[MT][2]) {
#pragma unroll
        for (int m = 0; m < MT; ++m) factor[m][0] *= rescale[m][0], factor[m][1] *= rescale[m][1];
    }

    // Add the total to the sums, as above.
    template <int VT>
    __device__ void add_total(const RowResults& results, RowState<MT>& state, Fragment<Accum, MT, VT>& acc,
                              bool has_total, bool is_last) {
        const Lane lane;
        const auto& [out, lse] = results;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = 16 * m + lane.row(2 * half);
                Accum& l = state.l[m][half];
#pragma unroll
                for (int step = 1; step < 4; step *= 2) l += __shfl_xor_sync(~0u, l, step);
                if (has_total && row < out.rows) l = fma(lse[row], factor[m][half], l);
                __syncwarp();  // all lanes have read it
                if (!is_last && lane.t == 0 && row < out.rows) lse[row] = l;
                if (!is_last || lane.t > 0) l = 0;
                if (is_last)
                    out.add_total(acc, m, half, factor[m][half]);
                else
                    out.add_to_total(acc, m, half, factor[m][half], has_total);
                factor[m][half] = 1;
            }
        __syncwarp();  // all lanes see the sums of a row
    }
};
