// Layer 3. What a launch passes to every kernel by value: twin of params.py, field by field.
#pragma once

#include "types.cuh"

// Distances in elements between entries of a batch, heads and rows; a row is contiguous.
struct Rows {
    i64 b, h, n;
};
// The same for what is broadcast to (B, Hq, Nq, Nk).
struct Pairs {
    i64 b, h, i, j;
};

// Every field has 8 bytes, so that neither side has gaps.
struct Params {
    // Arrays; null where a call has none.
    const void *q, *k, *v;
    void *out, *lse;
    const void* dout;
    const void* dlse;
    void *delta, *shift, *row_max;
    void *dq, *dk, *dv, *dq_sum;
    // Of each key head, what is special about it: bits as in plain.cuh. Of Hopper's own backward kernels:
    // how many works are claimed; and of each thread's share of each tile of dq, how many blocks of
    // keys have added to it if in order, or whether the first one has.
    u32 *special, *claimed, *landed;
    const void* bias;
    void* dbias;
    const void* mask;
    const void *slopes, *sinks;
    void* dsinks;
    const i64 *lengths, *offsets;
    const int* kinds;
    const bool* bits;
    const int* visits;
    const int* schedule;
    // Strides.
    Rows q_at, k_at, v_at, out_at, dout_at, dq_at, dk_at, dv_at, dlse_at;
    Pairs bias_at, dbias_at, mask_at, kinds_at, visits_at;
    i64 slopes_b;
    // Sizes; query heads of a key head; queries of a head that delta and shift have room for; parts
    // into which the key heads are divided to be worked on together; whether blocks of keys add to
    // dq one after the other.
    i64 B, Hq, Hkv, Nq, Nk, D, Dv, group, rows, parts, in_order;
    i64 bias_B, bias_H, bias_Nq, bias_Nk;
    i64 mask_block_q, mask_block_k;
    // Options; length and offset hold where the arrays of them are null.
    i64 length, offset, left, right;
    // What makes a score of what kernels hold: the scale where they fold it into the exponent, else 1.
    double scale, softcap, gain, natural;
    u64 seed, threshold;
};
