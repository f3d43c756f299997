// Layer 3. Where the rows of sequences are: in batch entries, or packed. As sequences.py.
#pragma once

#include "config.cuh"
#include "params.cuh"

constexpr i64 ALIGNED = -(1ll << 62);  // an offset that means: align the last query with the last key

// In lse_log2, delta and row_max, the rows of a head, or of a packed sequence, are padded to a multiple of
// this. A packed sequence of n rows has at least n + ROW_PAD rows there, so that tiles of any length may go
// past its end.
constexpr int ROW_PAD = 128, ROW_BLOCKS = 2;
__device__ inline i64 padded_start(i64 q_start, i64 b) {
    return PACKED ? (q_start / ROW_PAD + ROW_BLOCKS * b) * ROW_PAD : 0;
}

template <class T>
__device__ inline const T* rows_of(const void* data, const Rows& at, i64 b, i64 h) {
    return static_cast<const T*>(data) + b * at.b + h * at.h;
}
template <class T>
__device__ inline T* rows_of(void* data, const Rows& at, i64 b, i64 h) {
    return static_cast<T*>(data) + b * at.b + h * at.h;
}

// One sequence. The host has not checked lengths and offsets on the device. They are clamped, so that the
// sequence lies within the arrays.
struct Sequence {
    i64 b;                         // its index; arrays with a batch axis have an entry for it
    i64 q_start = 0, k_start = 0;  // its first rows in the rows of a head
    i64 Nq, Nk;

    __device__ Sequence(const Params& p, i64 b) : b(b), Nq(p.Nq), Nk(p.Nk) {
        if constexpr (PACKED) {
            place(p.query_ends(), b, q_start, Nq);
            if (!PAGED) place(p.key_ends(), b, k_start, Nk);
        }
    }
    __device__ Sequence(i64 b, i64 q_start, i64 k_start, i64 Nq, i64 Nk)
        : b(b), q_start(q_start), k_start(k_start), Nq(Nq), Nk(Nk) {}
    __device__ static void place(const Integers& ends, i64 b, i64& start, i64& rows) {
        start = min(max(ends[b], i64(0)), rows);
        rows = min(max(ends[b + 1], start), rows) - start;
    }

    // The number of valid keys, and the position of query 0.
    __device__ i64 length(const Params& p) const {
        const i64 given =
            p.kv_lengths ? integer_at(p.kv_lengths, p.kv_lengths_bytes, b) : p.length;
        return min(max(given, i64(0)), Nk);
    }
    __device__ i64 offset(const Params& p) const {
        if (p.q_offset) return integer_at(p.q_offset, p.q_offset_bytes, b);
        return p.offset == ALIGNED ? length(p) - Nq : p.offset;
    }

    // The batch entry of q, k, v and arrays with the same rows.
    __device__ i64 entry() const { return PACKED ? 0 : b; }

    template <class T, class Data>
    __device__ auto queries(Data* data, const Rows& at, i64 h) const {
        return rows_of<T>(data, at, entry(), h) + q_start * at.n;
    }
    template <class T, class Data>
    __device__ auto keys(Data* data, const Rows& at, i64 kv) const {
        return rows_of<T>(data, at, entry(), kv) + k_start * at.n;
    }
    // The row of the first query in an array with the rows of all heads.
    __device__ i64 row(const Params& p, i64 h) const {
        return (entry() * p.Hq + h) * p.Nq + q_start;
    }
    // The same in lse_log2, delta and row_max, whose rows are padded: a multiple of ROW_PAD.
    __device__ i64 padded_row(const Params& p, i64 h) const {
        return (entry() * p.Hq + h) * p.rows + padded_start(q_start, b);
    }
};

// Packed sequences with up to this many rows are split. They have kernels of their own, since the host does
// not know the rows of a sequence.
constexpr int PACKED_ROWS = 16;

// True if a packed sequence has rows, and few.
__device__ inline bool has_few_rows(const Params& p, const Sequence& sequence) {
    return sequence.Nq > 0 && p.group * sequence.Nq <= PACKED_ROWS;
}

// The number of blocks of a head with `rows` rows. Blocks are numbered. Block n of packed sequence b has
// the number start / BLOCK + b + n: this needs no sum over sequences, and only few numbers have no block.
template <int BLOCK>
__device__ inline int block_count(const Params& p, i64 rows) {
    return int(PACKED ? rows / BLOCK + p.entries : (rows + BLOCK - 1) / BLOCK);
}

// A block of a head, from its number and the index of the head, with `heads` heads in each batch entry. If
// packed, it may lie past the end of its sequence: then there is no block. Each sequence has numbers for its
// whole blocks, and for MORE.
template <int BLOCK, int MORE = 1>
struct HeadBlock {
    int b, h, block;

    // Each token has `rows` rows.
    __device__ HeadBlock(const Params& p, const Integers& ends, int heads, int head, int number,
                         int rows = 1)
        : b(head / heads), h(head % heads), block(number) {
        if constexpr (PACKED) {
            int end = int(p.entries);
            for (b = 0; end - b > 1;) {
                const int middle = (b + end) / 2;
                (first(ends, middle, rows) <= number ? b : end) = middle;
            }
            block = max(0, number - first(ends, b, rows));
        }
    }
    __device__ HeadBlock(int b, int h, int block) : b(b), h(h), block(block) {}

    // The number of the first block of packed sequence s.
    __device__ static int first(const Integers& ends, int s, int rows = 1) {
        return int(min(max(ends[s], i64(0)), i64(1) << 30) * rows / BLOCK) + MORE * s;
    }
};

// A block of a packed sequence in the order of work, as order_query_blocks and order_key_blocks write it.
struct alignas(16) PackedBlock {
    int b, block, q_start, k_start, Nq, Nk;
    int count;  // blocks of a head
    // L2 swizzle: the first block of the section that this block belongs to, the number of blocks in the
    // section, and the number of interleaved key heads.
    int first, together, heads;
    int unused[2];
};
