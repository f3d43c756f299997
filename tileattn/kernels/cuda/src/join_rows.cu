// Merge the results of some queries over a part of the keys with those over earlier parts, in place: a warp
// for each row. After the second part and until the last, sums are split in two halves (partial_rows.cuh).
// With the last part, the sink of each head is added to the denominator. `part` may be null if there is
// only a sink.
#include "partial_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    join_rows(Element* out, unsigned short* low, Accum* lse, const Element* part,
              const Accum* part_lse, const Accum* sinks, i64 entries, i64 heads, i64 part_rows,
              i64 head_stride, i64 rows, i64 row0, i64 entry_rows, i64 columns, i64 is_split, i64 splits) {
    const PartRows place = {heads, head_stride, rows, row0, entry_rows};
    const Sums<Element> sums = {out, low};
    const int lane = threadIdx.x % WARP;
    const i64 warps = i64(gridDim.x) * (THREADS / WARP), count = entries * heads * part_rows;
    i64 i = i64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    for (; i < count; i += warps) {
        const i64 head = i / part_rows, row = i % part_rows, from = place.in_part(head, row);
        const i64 to = place.in_result(head, row), half = place.in_halves(head, row);
        const Accum first_lse = lse[to], second_lse = part ? part_lse[from] : -infinity<Accum>();
        const Joined both(first_lse, second_lse);
        const Joined all(both.lse, sinks ? sinks[head % heads] : -infinity<Accum>());
        const Accum first = both.first * all.first, second = both.second * all.first;
        for (i64 c0 = lane; c0 < columns; c0 += TOGETHER * WARP) {
            Accum x[TOGETHER];
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const i64 c = c0 + n * WARP;
                if (c >= columns) break;
                const Accum own = sums.load(to * columns + c, half * columns + c, is_split);
                x[n] = weighted(first, own, first_lse);
                if (part) x[n] += weighted(second, widen(part[from * columns + c]), second_lse);
            }
#pragma unroll
            for (int n = 0; n < TOGETHER; ++n) {
                const i64 c = c0 + n * WARP;
                if (c >= columns) break;
                sums.store(to * columns + c, half * columns + c, x[n], splits);
            }
        }
        __syncwarp();  // all lanes have read the logsumexp
        if (lane == 0) lse[to] = all.lse;
    }
}
