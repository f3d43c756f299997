// Layer 3. Where sequences are: batch entries, or packed one behind the other. As sequences.py.
#pragma once

#include "config.cuh"
#include "params.cuh"

constexpr i64 ALIGNED = -(1ll << 62);  // an offset: the last query is aligned with the last key

constexpr int ROW_PAD = 128;  // rows that heads, or packed sequences, are padded to in statistics

template <class T>
__device__ inline const T* rows_of(const void* data, const Rows& at, i64 b, i64 h) {
    return static_cast<const T*>(data) + b * at.b + h * at.h;
}
template <class T>
__device__ inline T* rows_of(void* data, const Rows& at, i64 b, i64 h) {
    return static_cast<T*>(data) + b * at.b + h * at.h;
}

// One sequence. Nobody has seen offsets that are on the device: whatever they say, it lies within
// the arrays.
struct Sequence {
    i64 b;                         // its number: what has a batch axis has an entry of it
    i64 q_start = 0, k_start = 0;  // its first rows among those of a head
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

    // Keys that exist, and the position of query 0.
    __device__ i64 length(const Params& p) const {
        const i64 given =
            p.kv_lengths ? integer_at(p.kv_lengths, p.kv_lengths_bytes, b) : p.length;
        return min(max(given, i64(0)), Nk);
    }
    __device__ i64 offset(const Params& p) const {
        if (p.q_offset) return integer_at(p.q_offset, p.q_offset_bytes, b);
        return p.offset == ALIGNED ? length(p) - Nq : p.offset;
    }

    // Entry of arrays whose rows are those of the sequence.
    __device__ i64 entry() const { return PACKED ? 0 : b; }

    template <class T, class Data>
    __device__ auto queries(Data* data, const Rows& at, i64 h) const {
        return rows_of<T>(data, at, entry(), h) + q_start * at.n;
    }
    template <class T, class Data>
    __device__ auto keys(Data* data, const Rows& at, i64 kv) const {
        return rows_of<T>(data, at, entry(), kv) + k_start * at.n;
    }
    // Row of the first query among those of all heads.
    __device__ i64 row(const Params& p, i64 h) const {
        return (entry() * p.Hq + h) * p.Nq + q_start;
    }
    // The same in statistics, where its rows are padded, and so begin at a multiple of ROW_PAD.
    __device__ i64 padded_row(const Params& p, i64 h) const {
        const i64 start = PACKED ? (q_start / ROW_PAD + b) * ROW_PAD : 0;
        return (entry() * p.Hq + h) * p.rows + start;
    }
};

// The blocks of a head have numbers. Block n of packed sequence b has start / BLOCK + b + n: that
// takes no sum over sequences, and leaves few numbers without a block. `rows` are those of a head.
template <int BLOCK>
__device__ inline int block_count(const Params& p, i64 rows) {
    return int(PACKED ? rows / BLOCK + p.entries : (rows + BLOCK - 1) / BLOCK);
}

// A block of a head, by its number and that of the head among `heads` of each batch entry. Of packed
// sequences it may lie past the end of its sequence, and is nothing then.
template <int BLOCK>
struct HeadBlock {
    int b, h, block;

    // A token has `rows` rows.
    __device__ HeadBlock(const Params& p, const Integers& ends, int heads, int head, int number,
                         int rows = 1)
        : b(head / heads), h(head % heads), block(number) {
        if constexpr (PACKED) {
            auto first = [&](int s) {
                return int(min(max(ends[s], i64(0)), i64(1) << 30) * rows / BLOCK) + s;
            };
            int end = int(p.entries);
            for (b = 0; end - b > 1;) {
                const int middle = (b + end) / 2;
                (first(middle) <= number ? b : end) = middle;
            }
            block = max(0, number - first(b));
        }
    }
};

// The same in the order of work, as order_query_blocks and order_key_blocks write it.
struct alignas(16) PackedBlock {
    int b, block, q_start, k_start, Nq, Nk;
    int count;  // of all blocks of a head
    // Of those that take turns: where they begin, how many they are, and of how many key heads.
    int first, together, heads;
    int unused[2];
};
