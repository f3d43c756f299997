// Layer 3. What every kernel takes by value: params.py has the same fields.
#pragma once

#include "functions.cuh"
#include "integers.cuh"

// Strides in elements of batch entries, heads and rows. A row is contiguous.
struct Rows {
    i64 b, h, n;
};
// The same of arrays that broadcast to (B, Hq, Nq, Nk).
struct Pairs {
    i64 b, h, i, j;
};

struct PackedBlock;

// Every field has 8 bytes, so that neither side has gaps.
struct Fields {
    // Arrays; null where a call has none.
    const void *q, *k, *v;
    void *out, *lse;
    const void *kv_lengths, *q_offset, *cu_seqlens_q, *cu_seqlens_k, *block_table;
    const void *alibi_slopes, *sinks;
    u32* tile_counter;         // work tiles claimed in Hopper's kernels
    PackedBlock* block_order;  // the work tiles of a head, for Hopper's kernels
    int* next_tiles;               // behind each work tile the next that its CTA has claimed
    u32* lockstep_counters;                // how many CTAs have come so far, by steps
    void *partial_out, *partial_sums;  // of each row and split of the keys, as in splits.cuh
    const void* dout;
    const void* dlse;
    void *delta, *lse_log2, *row_max;
    void *dq, *dk, *dv, *dq_accum;
    // head_flags: of each key head, as in head_flags.cuh. dq_semaphore: of each dQ tile, how
    // many key blocks have added to it, if in_order; else whether one has claimed it, and has stored.
    // row_counter, dq_counter: of each key head, as in their headers.
    u32 *head_flags, *row_counter, *dq_semaphore, *dq_counter;
    const void* bias;
    void* dbias;
    const void* mask;
    void* dsinks;
    const int* block_kinds;
    const bool* block_bits;
    // tile_kinds: of a mask_mod, by tiles of one kernel of the pass. tile_ranks: with their kinds.
    signed char* tile_kinds;
    int2* tile_ranks;
    int* tile_list;
    const int* assignment;
    const i64* origin;  // of each sequence: b, h, i and j, from which dropout counts
    // Strides.
    Rows q_at, k_at, v_at, out_at, dout_at, dq_at, dk_at, dv_at, dlse_at;
    Pairs bias_at, dbias_at, mask_at, block_kinds_at, tile_kinds_at, tile_list_at;
    i64 alibi_slopes_b;
    // Sizes. group: query heads of a key head. rows: rows of a head in delta and lse_log2, padded.
    // single_heads: heads whose work tiles are scheduled one head after the other, before all others;
    // head_groups: in how many groups these are, one group after the other. in_order: whether
    // key blocks add to dQ in a fixed order. last_keys_first, run_keys: the order of a head's
    // key blocks and of their query tiles, as in `BwdWorkTile`. stagger: of successive blocks of
    // a head, where heads begin apart; inverse_stagger: modulo the blocks of a head. Of packed
    // sequences, key heads whose blocks take turns go through swizzle_rows at most, and are swizzle_heads
    // at most. lockstep_steps: of `Lockstep`; 0 where CTAs do not wait for each other.
    i64 B, Hq, Hkv, Nq, Nk, D, Dv, group, rows, single_heads, head_groups, swizzle_rows, swizzle_heads,
        in_order, last_keys_first, run_keys, stagger, inverse_stagger, lockstep_steps;
    i64 bias_B, bias_H, bias_Nq, bias_Nk;
    i64 mask_block_q, mask_block_k, kinds_tile_q, kinds_tile_k;
    // Options. length and offset hold where their arrays are null.
    i64 length, offset, left, right;
    // entries: sequences, which are batch entries or packed in one.
    i64 entries;
    // pages_total: of all sequences; page: keys of one; table_width: pages that a sequence may have.
    // split: keys of a split; splits: of the longest sequence that there is room for.
    // max_split_rows: that share keys, at most, of packed sequences that forward_split takes.
    i64 pages_total, page, table_width, split_keys, splits, max_split_rows;
    // Of the elements of the arrays of integers.
    i64 kv_lengths_bytes, q_offset_bytes, cu_seqlens_q_bytes, cu_seqlens_k_bytes, block_table_bytes;
    // softmax_scale: what the softmax multiplies scores by: the scale where that is folded into the
    // exponent, else 1, as score modifiers come after the scale.
    double scale, softcap, dropout_scale, softmax_scale;
    u64 seed, threshold;

    __device__ Integers query_ends() const { return {cu_seqlens_q, cu_seqlens_q_bytes}; }
    __device__ Integers key_ends() const { return {cu_seqlens_k, cu_seqlens_k_bytes}; }
};

// With the arrays that the caller's own functions read.
struct Params : Fields, AuxArrays {};
