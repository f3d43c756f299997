// Add the gradients of some rows to running sums in the place of the result. After the second part and
// until the last, the sums are split in two halves (partial_rows.cuh).
#include "partial_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    add_halves(Element* result, unsigned short* low, const Element* part, i64 entries, i64 heads,
               i64 part_rows, i64 head_stride, i64 rows, i64 row0, i64 entry_rows, i64 columns,
               i64 is_split, i64 splits) {
    const PartRows place = {heads, head_stride, rows, row0, entry_rows};
    const Sums<Element> sums = {result, low};
    const i64 size = part_rows * columns, step = i64(gridDim.x) * THREADS;
    for (i64 head = blockIdx.y; head < entries * heads; head += gridDim.y) {
        const i64 to = place.in_result(head, 0) * columns, half = place.in_halves(head, 0) * columns;
        const Element* const from = part + place.in_part(head, 0) * columns;
        i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
        for (; i < size; i += TOGETHER * step) {
            Accum x[TOGETHER];
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const i64 at = i + n * step;
                if (at >= size) break;
                x[n] = sums.load(to + at, half + at, is_split) + widen(from[at]);
            }
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const i64 at = i + n * step;
                if (at >= size) break;
                sums.store(to + at, half + at, x[n], splits);
            }
        }
    }
}
