// Layer 3. The parameter block, which every kernel takes by value. plan/params.py has the same
// sections, with the same fields in the same order.
#pragma once

#include "functions.cuh"
#include "integers.cuh"

// Strides in elements along batch entries, heads and rows. Each row is contiguous.
struct Rows {
    i64 b, h, n;
};
// Strides in elements of an array that broadcasts to (B, Hq, Nq, Nk); 0 along broadcast axes.
struct Pairs {
    i64 b, h, i, j;
};

struct PackedBlock;

// One flat struct: the compiler allocates registers differently with one base struct a section.
// Every field has 8 bytes, so that neither side needs padding.
struct Fields {
    // --- arrays ---------------------------------------------------------------------------
    // Addresses; null where a call does not have the array.
    const void *q, *k, *v;
    void *out, *lse;
    const void *kv_lengths, *q_offset, *cu_seqlens_q, *cu_seqlens_k, *block_table;
    const void *alibi_slopes, *sinks;
    u32* tile_counter;          // dynamic scheduler: number of work tiles handed out
    PackedBlock* block_order;   // packed sequences: the work tiles of a head, in order
    int* next_tiles;            // dynamic scheduler: for each work tile the CTA's next one
    u32* lockstep_counters;     // CTAs that have reached each step (lockstep.cuh)
    void *partial_out, *partial_sums;  // unnormalised sums of each row and split (splits.cuh)
    const void* dout;
    const void* dlse;
    void *delta, *lse_log2, *row_max;
    void *dq, *dk, *dv, *dq_accum;
    u32* head_flags;            // of all key heads together, then of each (head_flags.cuh)
    u32* row_counter;           // of each key head (row_counter.cuh)
    u32* dq_semaphore;          // of each dQ tile: in_order, the number of key blocks added so far;
                                // otherwise, whether one has claimed the tile, and has stored it
    u32* dq_counter;            // of each key head (dq_counter.cuh)
    void* split_sums;           // dK and dV of splits of the queries, and semaphores (query_split.cuh)
    u32* split_semaphores;
    const void* bias;
    void* dbias;
    void* dbias_sums;           // copies of dbias that CTAs sum into, if there are several
    const void* mask;
    void* dsinks;
    const int* block_kinds;
    const bool* block_bits;
    signed char* tile_kinds;    // of a mask_mod, for the tiles of one kernel of the pass
    int2* tile_ranks;           // scratch memory of the tile lists: rank and kind
    int* tile_list;
    const int* assignment;      // static scheduler: the work tiles of each worker
    const i64* origin;          // of each sequence: b, h, i, j at which dropout starts to count
    const float *k_descale, *v_descale;  // factors of keys and values of 8 bits
    void *q_planes, *k_planes, *v_planes, *dout_planes;      // float32 as float16 numbers (splitting.cuh)
    float *q_factors, *k_factors, *v_factors, *dout_factors;  // inverse factors of their tiles

    // --- strides --------------------------------------------------------------------------
    Rows q_at, k_at, v_at, out_at, dout_at, dq_at, dk_at, dv_at, dlse_at;
    Pairs bias_at, dbias_at, mask_at, block_kinds_at, tile_kinds_at, tile_list_at;
    i64 alibi_slopes_b;
    Rows k_descale_at, v_descale_at;  // n is 0 if all keys of a head have one factor

    // --- sizes ----------------------------------------------------------------------------
    i64 B, Hq, Hkv, Nq, Nk, D, Dv;
    i64 group;  // query heads of a key head
    i64 rows;   // padded rows of a head in delta and lse_log2

    // --- schedule -------------------------------------------------------------------------
    // The order of the work tiles. The planner decides (plan/scheduler.py).
    i64 single_heads;     // heads scheduled one after another, before the head groups
    i64 head_groups;      // L2 sections of heads, one after another
    i64 swizzle_rows;     // packed sequences, L2 swizzle: rows that interleaved heads may span
    i64 swizzle_heads;    //   and the largest number of interleaved key heads
    i64 in_order;         // 1: key blocks add to dQ in a fixed order
    i64 last_keys_first;  // 1: a head's last key block comes first (BwdWorkTile)
    i64 run_keys;         // every second run of this many keys visits its query tiles upwards
    i64 stagger;          // work tiles between successive key blocks of a head; 0: no stagger
    i64 inverse_stagger;  // its inverse modulo the key blocks of a head
    i64 head_splits;      // splits of the query heads of a key block (query_split.cuh)
    i64 split_heads;      // query heads of such a split
    i64 query_splits;     // splits of its queries
    i64 lockstep_steps;   // steps of Lockstep; 0: CTAs do not wait for each other

    // --- masks ----------------------------------------------------------------------------
    i64 bias_B, bias_H, bias_Nq, bias_Nk;
    i64 dbias_copies;                // CTAs that share a tile of dbias
    i64 mask_block_q, mask_block_k;  // queries and keys of a block of the block mask
    i64 kinds_tile_q, kinds_tile_k;  // queries and keys of a tile in tile_kinds

    // --- window ---------------------------------------------------------------------------
    i64 length, offset;  // of all sequences, where kv_lengths or q_offset is null
    i64 left, right;     // window bounds; -1: none
    i64 entries;         // sequences: batch entries, or packed in one

    // --- splits ---------------------------------------------------------------------------
    i64 pages_total;     // pages of all sequences
    i64 page;            // keys of a page
    i64 table_width;     // pages that one sequence may have
    i64 split_keys;      // keys of a split
    i64 splits;          // of the longest sequence that the arrays have room for
    i64 piece_keys;      // keys of a piece; a split consists of pieces (forward_decode_sm90)
    i64 group_keys;      // keys of a group; a group consists of splits (forward_combine)
    i64 max_split_rows;  // forward_split takes packed sequences with at most this many rows
    i64 partial_rows;    // of a key head in partial_out and partial_sums, if sequences are packed
    i64 k_descale_rows, v_descale_rows;  // 1: factors are by row of the cache; 0: by sequence

    // --- integers -------------------------------------------------------------------------
    // Bytes of an element of the caller's integer arrays: 4 or 8.
    i64 kv_lengths_bytes, q_offset_bytes, cu_seqlens_q_bytes, cu_seqlens_k_bytes, block_table_bytes;

    // --- scalars --------------------------------------------------------------------------
    double scale, softcap;
    double dropout_scale;  // 1 / (1 - dropout_p)
    double softmax_scale;  // factor of the exponent: the scale if it is folded in (FOLD), else 1,
                           // since score modifiers follow the scale
    u64 seed;
    u64 threshold;         // random 32-bit numbers below it drop

    __device__ Integers query_ends() const { return {cu_seqlens_q, cu_seqlens_q_bytes}; }
    __device__ Integers key_ends() const { return {cu_seqlens_k, cu_seqlens_k_bytes}; }
};

// With the arrays that the caller's own functions read.
struct Params : Fields, AuxArrays {};
