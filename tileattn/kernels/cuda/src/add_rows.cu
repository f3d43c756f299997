// Add the gradients of some rows to running sums, which are contiguous and have the accumulator type. The
// part has `part_rows` of the `rows` rows of each head, from `row0` on.
#include "config.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    add_rows(Accum* sums, const Element* part, i64 heads, i64 part_rows, i64 rows, i64 row0,
             i64 columns) {
    const i64 size = part_rows * columns, step = i64(gridDim.x) * THREADS;
    for (i64 head = blockIdx.y; head < heads; head += gridDim.y) {
        Accum* const to = sums + (head * rows + row0) * columns;
        const Element* const from = part + head * size;
        i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
#pragma unroll 4
        for (; i < size; i += step) to[i] += widen(from[i]);
    }
}
