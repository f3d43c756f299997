// Probe of nonfinite.cuh: a tile is cleaned, and accumulators get back what was not finite.
#include "softmax.cuh"
#include "nonfinite.cuh"

constexpr int MT = BLOCK_Q / (16 * WARPS_M), NT = BLOCK_K / (8 * WARPS_N);
constexpr int VT = VALUE_DIM / (8 * WARPS_N);

using Values = Tile<Element, BLOCK_K, VALUE_DIM>;
using Table = NonFinite<Element, BLOCK_K, VALUE_DIM>;

// values: (BLOCK_K, VALUE_DIM), cleaned in place; scores, keeps: (BLOCK_Q, BLOCK_K); sums:
// (BLOCK_Q, VALUE_DIM), to which is added; found: whether there was anything.
extern "C" __global__ void restored(Element* values, const Accum* scores, const bool* keeps,
                                      Accum* sums, i64* found) {
    __shared__ __align__(1024) char memory[Values::BYTES + Table::BYTES + BLOCK_Q * 64];
    const Values tile{memory};
    const Table table{tile.address + Values::BYTES};
    const AttendedRows<64> rows{table.address + Table::BYTES};
    const Lane lane;
    const RowGroup group(16 * MT);
    const int row0 = group.row0, column0 = group.warp_n * NT * 8, value0 = group.warp_n * VT * 8;
    for (int n = threadIdx.x; n < BLOCK_K * VALUE_DIM; n += blockDim.x)
        tile.element(Values::at(n / VALUE_DIM, n % VALUE_DIM)) = values[n];

    Fragment<Accum, MT, NT> s;
    Fragment<Accum, MT, VT> c;
    auto for_each = [&](auto& fragment, int column, int columns, auto visit) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < int(sizeof(fragment.x[m]) / sizeof(fragment.x[m][0])); ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    visit(fragment.x[m][n][e],
                          (row0 + 16 * m + lane.row(e)) * columns + column + 8 * n + lane.column(e),
                          m, n, e);
    };
    Attended<MT, NT> attended;
    for_each(s, column0, BLOCK_K, [&](Accum& x, int at, int, int, int) { x = scores[at]; });
    for_each(c, value0, VALUE_DIM, [&](Accum& x, int at, int, int, int) { x = sums[at]; });
    attended.mark(s);
    for_each(s, column0, BLOCK_K, [&](Accum&, int at, int m, int n, int e) {
        if (!keeps[at]) attended.drop(m, n, e);
    });
    __syncthreads();
    const bool any = __syncthreads_or(table.clean<WARPS_M * WARPS_N>(tile, threadIdx.x / WARP));
    if (threadIdx.x == 0) *found = any;
    if constexpr (WARPS_N > 1) {
        rows.store(attended, row0, column0);
        group.sync();
        add_non_finite(c, table, value0, [&](int m, int half, int w) {
            return load_shared(rows.at(row0 + 16 * m + lane.row(2 * half), w));
        });
    } else {
        add_non_finite(c, table, value0,
                       [&](int m, int half, int w) { return attended.word(m, half, w); });
    }
    for_each(c, value0, VALUE_DIM, [&](Accum& x, int at, int, int, int) { sums[at] = x; });
    for (int n = threadIdx.x; n < BLOCK_K * VALUE_DIM; n += blockDim.x)
        values[n] = tile.element(Values::at(n / VALUE_DIM, n % VALUE_DIM));
}
