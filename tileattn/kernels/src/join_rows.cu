// Join the results of some queries over some keys with those over the keys before: a warp for each
// row. Sums have the accumulator type, contiguous, with `rows` of each head; a part has
// `part_rows` of them, from `row0` on. The first part of a row is copied.
#include "partial_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    join_rows(Accum* out, Accum* lse, const Element* part, const Accum* part_lse, i64 heads,
              i64 part_rows, i64 rows, i64 row0, i64 columns, i64 is_first) {
    const int lane = threadIdx.x % WARP;
    const i64 warps = i64(gridDim.x) * (THREADS / WARP), count = heads * part_rows;
    i64 from = i64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    for (; from < count; from += warps) {
        const i64 head = from / part_rows, to = head * rows + row0 + from % part_rows;
        const Accum theirs = part_lse[from], mine = is_first ? theirs : lse[to];
        const Joined both(mine, theirs);
        const Element* const x = part + from * columns;
        Accum* const y = out + to * columns;
        if (is_first) {
#pragma unroll 4
            for (i64 c = lane; c < columns; c += WARP) y[c] = widen(x[c]);
        } else {
#pragma unroll 4
            for (i64 c = lane; c < columns; c += WARP)
                y[c] = weighted(both.first, y[c], mine) +
                       weighted(both.second, widen(x[c]), theirs);
        }
        __syncwarp();  // all lanes have read the logsumexp
        if (lane == 0) lse[to] = is_first ? theirs : both.lse;
    }
}
