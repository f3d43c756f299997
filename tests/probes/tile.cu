// Probe of tile.cuh: copies in and out, and every product that reads fragments from a tile.
#include "config.cuh"

using X = Tile<Element, BLOCK_Q, HEAD_DIM>;
using Y = Tile<Element, BLOCK_K, HEAD_DIM>;
constexpr int FIRST = 16;  // products begin at this row or column of their tiles

template <class T>
__device__ void poison(const T& tile) {
    for (int n = threadIdx.x; n < T::BYTES; n += blockDim.x) tile.base[n] = char(0xff);
    __syncthreads();
}

template <class T>
__device__ void fill(const T& tile, const Element* source, int rows) {
    tile.template load<THREADS, VECTOR>(source, HEAD_DIM, rows, HEAD_DIM);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
}

__device__ void write(const X& tile, Element* out) {
    for (int n = threadIdx.x; n < BLOCK_Q * HEAD_DIM; n += blockDim.x)
        out[n] = tile.element(n / HEAD_DIM, n % HEAD_DIM);
}

// Call visit(element, index) for each element of accumulators of a matrix with 8 * NT columns.
template <int MT, int NT, class Visit>
__device__ void for_each(Fragment<Sum, MT, NT>& c, Visit visit) {
    const Lane lane;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                visit(c.x[m][n][e],
                      (16 * m + lane.row(e)) * 8 * NT + 8 * n + lane.column(e));
}

// What the tile holds after a load, and what a store makes of the target.
extern "C" __global__ void copied(const Element* source, i64 stride, i64 rows, i64 columns,
                                  Element* held, Element* target) {
    __shared__ __align__(1024) char memory[X::BYTES];
    const X tile{memory};
    poison(tile);
    tile.load<THREADS, VECTOR>(source, stride, int(rows), int(columns));
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    write(tile, held);
    tile.store<THREADS, VECTOR>(target, stride, int(rows), int(columns));
}

// Accumulators of (BLOCK_Q - FIRST) x (HEAD_DIM - FIRST) numbers, from (FIRST, FIRST) on.
extern "C" __global__ void stored(const Sum* numbers, Element* held) {
    __shared__ __align__(1024) char memory[X::BYTES];
    const X tile{memory};
    poison(tile);
    Fragment<Sum, (BLOCK_Q - FIRST) / 16, (HEAD_DIM - FIRST) / 8> c;
    for_each(c, [&](Sum& x, int at) { x = numbers[at]; });
    store_fragment(tile, c, FIRST, FIRST);
    __syncthreads();
    write(tile, held);
}

// Load both matrices, add a product to ones, and write it out.
template <int ROWS, int COLUMNS, class Product>
__device__ void add_product(const Element* x, const Element* y, Sum* out, Product product) {
    __shared__ __align__(1024) char memory[X::BYTES + Y::BYTES];
    const X x_tile{memory};
    const Y y_tile{memory + X::BYTES};
    fill(x_tile, x, BLOCK_Q);
    fill(y_tile, y, BLOCK_K);
    Fragment<Sum, ROWS / 16, COLUMNS / 8> c;
    for_each(c, [](Sum& one, int) { one = 1; });
    product(c, x_tile, y_tile);
    for_each(c, [&](Sum& one, int at) { out[at] = one; });
}

// x[FIRST:] @ y[FIRST:].T: fragments a and b.
extern "C" __global__ void product(const Element* x, const Element* y, Sum* out) {
    add_product<BLOCK_Q - FIRST, BLOCK_K - FIRST>(
        x, y, out, [](auto& c, const X& x_tile, const Y& y_tile) {
            multiply<HEAD_DIM>(c, x_tile, FIRST, y_tile, FIRST);
        });
}

// numbers @ y[:, FIRST:]: accumulators as a, and b_transposed.
extern "C" __global__ void product_of_sums(const Element* x, const Element* y, const Sum* numbers,
                                           Sum* out) {
    add_product<BLOCK_Q - FIRST, HEAD_DIM - FIRST>(
        x, y, out, [&](auto& c, const X&, const Y& y_tile) {
            Fragment<Sum, (BLOCK_Q - FIRST) / 16, BLOCK_K / 8> sums;
            for_each(sums, [&](Sum& one, int at) { one = numbers[at]; });
            multiply(c, sums, y_tile, FIRST);
        });
}

// x[:BLOCK_K, FIRST:].T @ y[:, FIRST:]: a_transposed and b_transposed.
extern "C" __global__ void product_of_columns(const Element* x, const Element* y, Sum* out) {
    add_product<HEAD_DIM - FIRST, HEAD_DIM - FIRST>(
        x, y, out, [](auto& c, const X& x_tile, const Y& y_tile) {
            multiply_rows<true, BLOCK_K>(c, x_tile, FIRST, y_tile, FIRST);
        });
}

// x[FIRST:, :BLOCK_K] @ y[:, FIRST:]: a and b_transposed.
extern "C" __global__ void product_of_rows(const Element* x, const Element* y, Sum* out) {
    add_product<BLOCK_Q - FIRST, HEAD_DIM - FIRST>(
        x, y, out, [](auto& c, const X& x_tile, const Y& y_tile) {
            multiply_rows<false, BLOCK_K>(c, x_tile, FIRST, y_tile, FIRST);
        });
}
