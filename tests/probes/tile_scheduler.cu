// Probe of tile_scheduler.cuh: the block of each CTA, and the tiles of a block that are not empty.
#include "tile_scheduler.cuh"

// Block and head of each CTA.
extern "C" __global__ void block_coords(i64 blocks, i64 heads, i64 groups, int* block_and_head) {
    const BlockCoord coord{int(blocks), int(heads), int(groups)};
    block_and_head[2 * blockIdx.x] = coord.block;
    block_and_head[2 * blockIdx.x + 1] = coord.head;
}

__device__ AttentionMask mask_of(Params& p, const bool* mask, const int* kinds, const bool* bits,
                                 i64 b, i64 h) {
    p.mask = mask;
    p.block_kinds = kinds;
    p.block_bits = bits;
    return AttentionMask(p, b, h);
}

struct TileKind {
    int tile, kind;
};

template <class KindOf>
__device__ void trace(Range range, int block, KindOf kind_of, TileKind* out) {
    for (TileIterator tiles(range.lo / block, (range.hi + block - 1) / block, kind_of);
         !tiles.done(); tiles.next()) {
        if (threadIdx.x == 0) *out = {tiles.tile, tiles.kind};
        ++out;
    }
}

// Key tiles of query block blockIdx.x, for head blockIdx.y of batch entry 0.
extern "C" __global__ void key_tile_kinds(Params p, const bool* mask, const int* kinds,
                                      const bool* bits, TileKind* out, i64 most) {
    const AttentionMask attn_mask = mask_of(p, mask, kinds, bits, 0, blockIdx.y);
    const int q0 = blockIdx.x * BLOCK_Q, q1 = q0 + BLOCK_Q;
    trace(
        attn_mask.window.key_range(q0, min(q1, int(p.Nq))), BLOCK_K,
        [&](int tile) { return attn_mask.kind(q0, q1, tile * BLOCK_K, (tile + 1) * BLOCK_K); },
        out + (blockIdx.y * gridDim.x + blockIdx.x) * most);
}

// Query tiles of key block blockIdx.x, for head blockIdx.y of batch entry 0.
extern "C" __global__ void query_tile_kinds(Params p, const bool* mask, const int* kinds,
                                        const bool* bits, TileKind* out, i64 most) {
    const AttentionMask attn_mask = mask_of(p, mask, kinds, bits, 0, blockIdx.y);
    const int k0 = blockIdx.x * BLOCK_K, k1 = k0 + BLOCK_K;
    trace(
        attn_mask.window.query_range(k0, k1), BLOCK_Q,
        [&](int tile) { return attn_mask.kind(tile * BLOCK_Q, (tile + 1) * BLOCK_Q, k0, k1); },
        out + (blockIdx.y * gridDim.x + blockIdx.x) * most);
}
