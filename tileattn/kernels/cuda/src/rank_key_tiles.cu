// Before the backward pass: find the kind of each tile for all query heads that share a key head, and its
// rank: the number of listed key tiles before it in the same row.
#include "tile_lists.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    rank_key_tiles(const __grid_constant__ Params p) {
    overlap_launches();
    const int columns = column_count(p), rows = row_count(p);
    const TileLine at(p, int(p.Hkv), rows);
    if (!at.is_there) return;
    // If heads do not differ, all have the kinds of the first.
    const int group = p.tile_kinds_at.h ? int(p.group) : 1;
    const signed char* const kinds = p.tile_kinds + at.b * p.tile_kinds_at.b +
                                     i64(at.h) * group * p.tile_kinds_at.h +
                                     at.line * p.tile_kinds_at.i;
    const int heads = p.tile_list_at.h ? int(p.Hkv) : 1;
    int2* const ranks = p.tile_ranks + ((i64(at.b) * heads + at.h) * rows + at.line) * columns;
    TileCount listed;
    for (int first = 0; first < columns; first += WARP) {
        const int column = first + threadIdx.x % WARP;
        int least = column < columns ? FULL : EMPTY, most = EMPTY;
        for (int g = 0; column < columns && g < group; ++g) {
            const int kind = kinds[g * p.tile_kinds_at.h + column];
            least = min(least, kind), most = max(most, kind);
        }
        const int rank = listed.before(most != EMPTY);
        const int kind = most == EMPTY ? EMPTY : least == FULL ? FULL : PARTIAL;
        if (column < columns) ranks[column] = {kind, rank};
    }
}
