// Probe of mask.cuh: masks of pairs and boxes.
#include "mask.cuh"

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
    const SlidingWindow window(p, Sequence(p, blockIdx.x));
    for (i64 n = threadIdx.x; n < count; n += blockDim.x) {
        const Box& box = boxes[n];
        answers[blockIdx.x * count + n] = {
            window.visible(box.q0, box.k0), window.kind(box.q0, box.q1, box.k0, box.k1),
            window.key_range(box.q0, box.q1), window.query_range(box.k0, box.k1)};
    }
}

// Head blockIdx.x of batch entry blockIdx.y: kinds of boxes, and every pair.
extern "C" __global__ void attention_masks(Params p, const bool* mask, const int* kinds,
                                           const bool* bits, const Box* boxes, i64 count,
                                           int* box_kinds, bool* visible) {
    p.mask = mask;
    p.block_kinds = kinds;
    p.block_bits = bits;
    const AttentionMask attn_mask(p, blockIdx.y, blockIdx.x);
    const i64 head = blockIdx.y * p.Hq + blockIdx.x;
    for (i64 n = threadIdx.x; n < count; n += blockDim.x)
        box_kinds[head * count + n] =
            attn_mask.kind(boxes[n].q0, boxes[n].q1, boxes[n].k0, boxes[n].k1);
    for (i64 n = threadIdx.x; n < p.Nq * p.Nk; n += blockDim.x)
        visible[head * p.Nq * p.Nk + n] = attn_mask.visible(int(n / p.Nk), int(n % p.Nk));
}
