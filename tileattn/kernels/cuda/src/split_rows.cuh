// Layer 3. Split float32 rows into float16 numbers, for kernels on float16 tensor cores: one CTA for each tile of
// 64 rows of a head. As split_tiles in splitting.py.
#pragma once

#include "planes.cuh"
#include "rows.cuh"

constexpr int COLUMNS = HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM;

// The number of lanes that share a row. It divides the number of vectors, so that no lane is idle.
constexpr int even_lanes() {
    int lanes = 1;
    while (lanes < WARP && COLUMNS / VECTOR_SIZE % (2 * lanes) == 0) lanes *= 2;
    return lanes;
}
constexpr int LANES = even_lanes();
constexpr int VECTORS = COLUMNS / VECTOR_SIZE / LANES;  // of a lane and row
constexpr int TOGETHER = THREADS / LANES, PASSES = TILE_ROWS / TOGETHER;
static_assert(PASSES * TOGETHER == TILE_ROWS && VECTOR_SIZE <= 4, "whole passes");

// A row may be this much smaller than the largest row of its tile: then its digits are kept.
constexpr float SMALLEST_ROW = 0x1p-24f;

// The largest and the smallest of the numbers of all threads, where 0 does not count as small.
__device__ inline void reduce_tile(float& largest, float& smallest) {
    __shared__ float parts[2][THREADS / WARP];
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        smallest = fminf(smallest, __shfl_xor_sync(~0u, smallest, step));
    }
    if (threadIdx.x % WARP == 0)
        parts[0][threadIdx.x / WARP] = largest, parts[1][threadIdx.x / WARP] = smallest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / WARP; ++w)
        largest = fmaxf(largest, parts[0][w]), smallest = fminf(smallest, parts[1][w]);
}

// Split the rows of a tile. Rows that are not valid count as zero, and are stored if they belong to the sequence.
__device__ inline void split_tile(const Element* from, i64 stride, int columns, float16* to, int plane_row,
                                  int rows, int valid, float* inverse) {
    const int row0 = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Vector<Element> x[PASSES][VECTORS];
    auto load = [&](auto load_one) {
#pragma unroll
        for (int i = 0; i < PASSES; ++i)
#pragma unroll
            for (int n = 0; n < VECTORS; ++n) {
                const int row = row0 + i * TOGETHER, column = (lane + n * LANES) * VECTOR_SIZE;
                x[i][n] = load_one(from + row * stride + column, row < valid ? columns - column : 0);
            }
    };
    if (columns % VECTOR_SIZE)
        load(load_vector);
    else
        load([](const Element* source, int count) { return load_whole(source, 0, count); });
    float largest = 0, smallest = infinity<float>();
    bool finite = true;
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        float most = 0;
#pragma unroll
        for (int n = 0; n < VECTORS; ++n)
#pragma unroll
            for (const float& e : x[i][n].values) finite = finite && is_finite(e), most = fmaxf(most, fabsf(e));
#pragma unroll
        for (int step = LANES / 2; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        largest = fmaxf(largest, most);
        if (most > 0) smallest = fminf(smallest, most);
    }
    finite = __syncthreads_and(finite);
    reduce_tile(largest, smallest);
    const float factor = power_of_two(largest);
    const bool kept = finite && smallest / SMALLEST_ROW >= largest;
    if (threadIdx.x == 0) *inverse = kept ? inverse_power(factor) : __uint_as_float(0x7fffffff);
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        const int row = row0 + i * TOGETHER;
#pragma unroll
        for (int n = 0; n < VECTORS; ++n) {
            const int column = (lane + n * LANES) * VECTOR_SIZE;
            if (row >= rows || high_column(column) >= plane_row) continue;
            Vector<float16> high, low;
#pragma unroll
            for (int e = 0; e < VECTOR_SIZE; ++e) {
                const Split parts = split(x[i][n].values[e], factor);
                high.values[e] = parts.high, low.values[e] = parts.low;
            }
            float16* const own = to + i64(row) * plane_row;
            *reinterpret_cast<Vector<float16>*>(own + high_column(column)) = high;
            *reinterpret_cast<Vector<float16>*>(own + low_column(column)) = low;
        }
    }
}

// An array to split: its rows in memory, and its planes and inverse factors.
struct SplitArray {
    const void* rows;
    const Rows& at;
    int columns, plane_row;
    void* planes;
    float* factors;
};

// The tile of a CTA. Even CTAs split k or q, odd CTAs v or dO.
struct SplitWork {
    bool second;
    int index;  // of the tile, among the tiles of all heads

    __device__ SplitWork() : second(blockIdx.x % 2), index(int(blockIdx.x / 2)) {}

    // Split rows from row0 of a sequence on: `rows` rows belong to the sequence, and `valid` of them count.
    __device__ void split(const SplitArray& x, i64 entry, i64 h, i64 heads, i64 array_rows, i64 start, int block,
                          int rows, int valid) const {
        const int row0 = block * TILE_ROWS;
        const Element* const from = rows_of<Element>(x.rows, x.at, entry, h) + (start + row0) * x.at.n;
        float16* const to = static_cast<float16*>(x.planes) +
                            ((entry * heads + h) * array_rows + start + row0) * x.plane_row;
        split_tile(from, x.at.n, x.columns, to, x.plane_row, rows - row0, valid - row0,
                   x.factors + block);
    }
};
