// Probe of blocks.cuh: masks of pairs and boxes, and the tiles that are not empty.
#include "blocks.cuh"

struct Box {
    int q0, q1, k0, k1;
};
struct Answer {
    int visible, kind;
    Range keys, queries;
};

// Batch entry blockIdx.x. The pair of a box is its first.
extern "C" __global__ void windows(Params p, const i64* lengths, const i64* offsets,
                                   const Box* boxes, i64 count, Answer* answers) {
    p.kv_lengths = lengths;
    p.q_offset = offsets;
    const Window window(p, blockIdx.x);
    for (i64 n = threadIdx.x; n < count; n += blockDim.x) {
        const Box& box = boxes[n];
        answers[blockIdx.x * count + n] = {
            window.visible(box.q0, box.k0), window.kind(box.q0, box.q1, box.k0, box.k1),
            window.keys_of(box.q0, box.q1), window.queries_of(box.k0, box.k1)};
    }
}

// Block and head of each CTA.
extern "C" __global__ void block_coords(i64 blocks, i64 heads, i64 groups, int* block_and_head) {
    const BlockCoord coord{int(blocks), int(heads), int(groups)};
    block_and_head[2 * blockIdx.x] = coord.block;
    block_and_head[2 * blockIdx.x + 1] = coord.head;
}

__device__ AttentionMask attention_mask_of(Params& p, const bool* mask, const int* kinds,
                                           const bool* bits, i64 b, i64 h) {
    p.mask = mask;
    p.block_kinds = kinds;
    p.block_bits = bits;
    return AttentionMask(p, b, h);
}

// Head blockIdx.x of batch entry blockIdx.y: kinds of boxes, and every pair.
extern "C" __global__ void attention_masks(Params p, const bool* mask, const int* kinds,
                                           const bool* bits, const Box* boxes, i64 count,
                                           int* box_kinds, bool* visible) {
    const AttentionMask attn_mask = attention_mask_of(p, mask, kinds, bits, blockIdx.y, blockIdx.x);
    const i64 head = blockIdx.y * p.Hq + blockIdx.x;
    for (i64 n = threadIdx.x; n < count; n += blockDim.x)
        box_kinds[head * count + n] =
            attn_mask.kind(boxes[n].q0, boxes[n].q1, boxes[n].k0, boxes[n].k1);
    for (i64 n = threadIdx.x; n < p.Nq * p.Nk; n += blockDim.x)
        visible[head * p.Nq * p.Nk + n] = attn_mask.visible(int(n / p.Nk), int(n % p.Nk));
}

struct TileKind {
    int tile, kind;
};

template <class KindOf>
__device__ void trace(Range range, int block, KindOf kind_of, TileKind* out) {
    for (TileIterator visit(range.lo / block, (range.hi + block - 1) / block, kind_of);
         !visit.done(); visit.next()) {
        if (threadIdx.x == 0) *out = {visit.tile, visit.kind};
        ++out;
    }
}

// Key tiles of query block blockIdx.x, for head blockIdx.y of batch entry 0.
extern "C" __global__ void key_tile_kinds(Params p, const bool* mask, const int* kinds,
                                          const bool* bits, TileKind* out, i64 most) {
    const AttentionMask attn_mask = attention_mask_of(p, mask, kinds, bits, 0, blockIdx.y);
    const int q0 = blockIdx.x * BLOCK_Q, q1 = q0 + BLOCK_Q;
    trace(
        attn_mask.window.keys_of(q0, min(q1, int(p.Nq))), BLOCK_K,
        [&](int tile) { return attn_mask.kind(q0, q1, tile * BLOCK_K, (tile + 1) * BLOCK_K); },
        out + (blockIdx.y * gridDim.x + blockIdx.x) * most);
}

// Query tiles of key block blockIdx.x, for head blockIdx.y of batch entry 0.
extern "C" __global__ void query_tile_kinds(Params p, const bool* mask, const int* kinds,
                                            const bool* bits, TileKind* out, i64 most) {
    const AttentionMask attn_mask = attention_mask_of(p, mask, kinds, bits, 0, blockIdx.y);
    const int k0 = blockIdx.x * BLOCK_K, k1 = k0 + BLOCK_K;
    trace(
        attn_mask.window.queries_of(k0, k1), BLOCK_Q,
        [&](int tile) { return attn_mask.kind(tile * BLOCK_Q, (tile + 1) * BLOCK_Q, k0, k1); },
        out + (blockIdx.y * gridDim.x + blockIdx.x) * most);
}
