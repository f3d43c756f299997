// Before a pass with a mask_mod: find the kinds of its tiles from bounds of the function. A CTA takes a row
// of tiles. A thread takes one tile at a time, or a warp if the function reads arrays: its lanes divide the
// elements. Mirrors kinds_by_intervals in quadtree.py.
#include "params.cuh"

constexpr int TILE_THREADS = MaskIntervals::READS_ARRAYS ? WARP : 1;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    classify_tiles(const __grid_constant__ Params p) {
    overlap_launches();
    const int rows = int((p.Nq + BLOCK_Q - 1) / BLOCK_Q);
    const int columns = int((p.Nk + BLOCK_K - 1) / BLOCK_K);
    const int heads = p.tile_kinds_at.h ? int(p.Hq) : 1;
    const int row = int(blockIdx.x) % rows, bh = int(blockIdx.x) / rows;
    const MaskIntervals mask(p, bh / heads, bh % heads);
    signed char* const kinds = p.tile_kinds + i64(blockIdx.x) * columns;
    const Interval<int> queries(double(row * BLOCK_Q),
                                double(min(row * BLOCK_Q + BLOCK_Q, int(p.Nq)) - 1));
    for (int column = int(threadIdx.x) / TILE_THREADS; column < columns; column += THREADS / TILE_THREADS) {
        const int k0 = column * BLOCK_K;
        const Interval<int> keys(double(k0), double(min(k0 + BLOCK_K, int(p.Nk)) - 1));
        const Interval<bool> visible = mask.visible(queries, keys);
        // The number of bounds that are true: 0 is EMPTY, 1 PARTIAL, 2 FULL.
        if (threadIdx.x % TILE_THREADS == 0) kinds[column] = (signed char)(visible.low + visible.high);
    }
}
