// Split float32 keys and values into float16 numbers, for kernels on Hopper's tensor cores: one CTA for each tile
// of 64 rows of a key head. As split_tiles in splitting.py. Also clears the flags of heads.
#include "head_flags.cuh"
#include "planes.cuh"
#include "rows.cuh"
#include "tile_scheduler.cuh"

constexpr int COLUMNS = HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM;
constexpr int LANES = lanes_of_row(COLUMNS);  // of a row
constexpr int VECTORS = (COLUMNS + LANES * VECTOR_SIZE - 1) / (LANES * VECTOR_SIZE);  // of a lane and row
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
    float largest = 0, smallest = infinity<float>();
    bool finite = true;
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
        const int row = row0 + i * TOGETHER;
        float most = 0;
#pragma unroll
        for (int n = 0; n < VECTORS; ++n) {
            const int column = (lane + n * LANES) * VECTOR_SIZE;
            x[i][n] = load_vector(from + row * stride + column, row < valid ? columns - column : 0);
#pragma unroll
            for (const float& e : x[i][n].values) finite = finite && is_finite(e), most = fmaxf(most, fabsf(e));
        }
#pragma unroll
        for (int step = LANES / 2; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        largest = fmaxf(largest, most);
        if (most > 0) smallest = fminf(smallest, most);
    }
    finite = __syncthreads_and(finite);
    reduce_tile(largest, smallest);
    const float factor = power_of_two(largest);
    const bool kept = finite && smallest >= largest * SMALLEST_ROW;
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

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    split_rows(const __grid_constant__ Params p) {
    overlap_launches();
    if (blockIdx.x == 0)
        for (int i = threadIdx.x; i < 2 + p.entries * p.Hkv; i += THREADS) p.head_flags[i] = 0;
    const int blocks = block_count<TILE_ROWS>(p, p.Nk), index = int(blockIdx.x / 2);
    const bool of_values = blockIdx.x % 2;
    const HeadBlock<TILE_ROWS> at(p, p.key_ends(), int(p.Hkv), index / blocks, index % blocks);
    const Sequence sequence(p, at.b);
    const int row0 = at.block * TILE_ROWS, rows = int(sequence.Nk) - row0;
    if (rows <= 0) return;
    const int valid = int(sequence.length(p)) - row0;
    const i64 place = first_factor(p, sequence.entry(), sequence.k_start, at.b, at.h) + at.block;
    const Rows& strides = of_values ? p.v_at : p.k_at;
    const Element* const from =
        (of_values ? sequence.keys<Element>(p.v, p.v_at, at.h) : sequence.keys<Element>(p.k, p.k_at, at.h)) +
        row0 * strides.n;
    const int plane_row = plane_columns(of_values ? VALUE_DIM : HEAD_DIM);
    float16* const to = static_cast<float16*>(of_values ? p.v_planes : p.k_planes) +
                        ((sequence.entry() * p.Hkv + at.h) * p.Nk + sequence.k_start + row0) * plane_row;
    split_tile(from, strides.n, int(of_values ? p.Dv : p.D), to, plane_row, rows, valid,
               (of_values ? p.v_factors : p.k_factors) + place);
}
