// Before the forward pass: list the key tiles of each query tile, from their kinds.
#include "tile_lists.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    list_key_tiles(const __grid_constant__ Params p) {
    overlap_launches();
    const int columns = column_count(p), lane = threadIdx.x % WARP;
    const TileLine at(p, int(p.Hq), row_count(p));
    if (!at.is_there) return;
    const signed char* const kinds = p.tile_kinds + at.b * p.tile_kinds_at.b +
                                     at.h * p.tile_kinds_at.h + at.line * p.tile_kinds_at.i;
    int* const entries =
        p.tile_list + at.b * p.tile_list_at.b + at.h * p.tile_list_at.h + at.line * p.tile_list_at.i;
    TileCount listed;
    for (int first = 0; first < columns; first += WARP) {
        const int column = first + lane;
        const int kind = column < columns ? kinds[column] : EMPTY;
        const int n = listed.before(kind != EMPTY);
        if (kind != EMPTY) entries[n] = TileEntry::of(column, kind != FULL);
    }
    for (int n = listed.count + lane; n <= columns; n += WARP) entries[n] = TileEntry::end(listed.count);
}
