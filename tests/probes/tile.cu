// Probe of tile.cuh: every GEMM that loads fragments from a tile, and fragments stored and loaded.
#include "config.cuh"

using X = Tile<Element, BLOCK_Q, HEAD_DIM>;
using Y = Tile<Element, BLOCK_K, HEAD_DIM>;
// The share of the second of several warps: rows from 16 on, and the second half of the columns.
constexpr int M0 = 16, M = BLOCK_Q - M0, N0 = HEAD_DIM / 2, N = HEAD_DIM - N0;

// Call visit(element, index) for each element of accumulators of a matrix with 8 * NT columns.
template <int MT, int NT, class TileKind>
__device__ void for_each(Fragment<Accum, MT, NT>& c, TileKind visit) {
    const Lane lane;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                visit(c.x[m][n][e], (16 * m + lane.row(e)) * 8 * NT + 8 * n + lane.column(e));
}

// Accumulators of M x N numbers, each row times its factor, in a tile.
extern "C" __global__ void stored(const Accum* numbers, const Accum* factors, Element* held) {
    __shared__ __align__(1024) char memory[X::BYTES];
    const X tile{memory};
    const Lane lane;
    Fragment<Accum, M / 16, N / 8> c;
    for_each(c, [&](Accum& x, int at) { x = numbers[at]; });
    Accum rows[M / 16][2];
    for (int m = 0; m < M / 16; ++m)
        for (int half = 0; half < 2; ++half) rows[m][half] = factors[16 * m + lane.row(2 * half)];
    c.scale_rows(rows);
    store_fragment(tile, c, M0, N0);
    __syncthreads();
    for (int n = threadIdx.x; n < M * N; n += blockDim.x)
        held[n] = tile.element(X::at(M0 + n / N, N0 + n % N));
}

// Accumulators of M x N numbers, added to the first rows of BLOCK_Q x HEAD_DIM sums.
extern "C" __global__ void added(const Accum* numbers, i64 rows, Accum* sums, Accum* in_order) {
    Fragment<Accum, M / 16, N / 8> c;
    for_each(c, [&](Accum& x, int at) { x = numbers[at]; });
    add_rows(sums, HEAD_DIM, c, M0, N0, int(rows));
    __syncthreads();
    for (int n = threadIdx.x; n < BLOCK_Q * HEAD_DIM; n += blockDim.x)
        in_order[n] = __ldcg(sums + n / HEAD_DIM * HEAD_DIM + accum_column<Accum>(n % HEAD_DIM));
}

// Load both matrices, add a product to ones, and write it out.
template <int ROWS, int COLUMNS, class Product>
__device__ void add_product(const Element* x, const Element* y, Accum* out, Product product) {
    __shared__ __align__(1024) char memory[X::BYTES + Y::BYTES];
    const X x_tile{memory};
    const Y y_tile{memory + X::BYTES};
    x_tile.template load<THREADS, ALIGNMENT_BYTES>(x, HEAD_DIM, BLOCK_Q, HEAD_DIM);
    y_tile.template load<THREADS, ALIGNMENT_BYTES>(y, HEAD_DIM, BLOCK_K, HEAD_DIM);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    Fragment<Accum, ROWS / 16, COLUMNS / 8> c;
    for_each(c, [](Accum& one, int) { one = 1; });
    product(c, x_tile, y_tile);
    for_each(c, [&](Accum& one, int at) { out[at] = one; });
}

// x[M0:] @ y[16:].T: fragments a and b.
extern "C" __global__ void product(const Element* x, const Element* y, Accum* out) {
    add_product<M, BLOCK_K - 16>(x, y, out, [](auto& c, const X& x_tile, const Y& y_tile) {
        multiply<HEAD_DIM>(c, x_tile, M0, y_tile, 16);
    });
}

// The same, infinite and NaN where IEEE arithmetic is.
extern "C" __global__ void careful_product(const Element* x, const Element* y, Accum* out) {
    add_product<M, BLOCK_K - 16>(x, y, out, [](auto& c, const X& x_tile, const Y& y_tile) {
        multiply<HEAD_DIM, HEAD_DIM / 16, false, true>(c, x_tile, M0, y_tile, 16);
    });
}

// numbers @ y[:, N0:]: accumulators as a, and b_transposed.
extern "C" __global__ void product_of_sums(const Element* x, const Element* y, Accum* out,
                                           const Accum* numbers) {
    add_product<M, N>(x, y, out, [&](auto& c, const X&, const Y& y_tile) {
        Fragment<Accum, M / 16, BLOCK_K / 8> sums;
        for_each(sums, [&](Accum& one, int at) { one = numbers[at]; });
        multiply(c, sums, y_tile, N0);
    });
}

// x[:BLOCK_K, N0:].T @ y[:, N0:]: a_transposed and b_transposed.
extern "C" __global__ void product_of_columns(const Element* x, const Element* y, Accum* out) {
    add_product<N, N>(x, y, out, [](auto& c, const X& x_tile, const Y& y_tile) {
        multiply_rows<true, BLOCK_K>(c, x_tile, N0, y_tile, N0);
    });
}

// x[M0:, :BLOCK_K] @ y[:, N0:]: a and b_transposed.
extern "C" __global__ void product_of_rows(const Element* x, const Element* y, Accum* out) {
    add_product<M, N>(x, y, out, [](auto& c, const X& x_tile, const Y& y_tile) {
        multiply_rows<false, BLOCK_K>(c, x_tile, M0, y_tile, N0);
    });
}
