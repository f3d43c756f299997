// Before the backward pass: list the query tiles of each key tile, each with its rank.
#include "tile_lists.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    list_query_tiles(const __grid_constant__ Params p) {
    overlap_launches();
    const int columns = column_count(p), rows = row_count(p), lane = threadIdx.x % WARP;
    const TileLine at(p, int(p.Hkv), columns);
    if (!at.is_there) return;
    const int heads = p.tile_list_at.h ? int(p.Hkv) : 1;
    const int2* const ranks = p.tile_ranks + (i64(at.b) * heads + at.h) * rows * columns + at.line;
    int2* const entries = reinterpret_cast<int2*>(p.tile_list + at.b * p.tile_list_at.b +
                                                  at.h * p.tile_list_at.h +
                                                  at.line * p.tile_list_at.i);
    TileCount listed;
    for (int first = 0; first < rows; first += WARP) {
        const int row = first + lane;
        const int2 tile = row < rows ? ranks[i64(row) * columns] : int2{EMPTY, 0};
        const int n = listed.before(tile.x != EMPTY);
        if (tile.x != EMPTY) entries[n] = {TileEntry::of(row, tile.x != FULL), tile.y};
    }
    for (int n = listed.count + lane; n <= rows; n += WARP) entries[n] = {TileEntry::end(listed.count), 0};
}
