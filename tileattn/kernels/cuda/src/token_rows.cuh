// Layer 3. Write the rows of tokens to their places, by a few threads for each row, and apply RoPE to some
// of the columns. As kv_cache.py and rotary.py.
#pragma once

#include "integers.cuh"

constexpr int VECTOR_SIZE = ALIGNMENT_BYTES / int(sizeof(Element));
struct alignas(ALIGNMENT_BYTES) Vector {
    Element x[VECTOR_SIZE];
};

// Strides in elements of entries, heads, rows and columns.
struct Strides {
    i64 b, h, n, d;
};
// An array of rows. pairs: pairs of columns that are rotated. row_threads: threads of a row.
struct RowArray {
    Strides from, to;
    i64 columns, pairs, row_threads;
};
// Factors of a cache of 8 bits: strides of entries, heads and rows. by_row: 1 if each row has a factor,
// which is written; 0 if each sequence and head has one, which is read.
struct Factors {
    i64 b, h, n, by_row;
};
// A table of cosines or sines by position and pair. bytes: of an element; 0 means bfloat16.
struct Table {
    i64 bytes, n, c;
};

// token_rows.py has the same fields. Each has 8 bytes. If `positions` is null all sequences start at
// `position`; another null array means that the call does not have it.
struct TokenParams {
    const void *k, *v;
    void *k_cache, *v_cache;
    const void *cos, *sin, *positions, *cu_seqlens, *block_table;
    i64* new_lengths;
    float *k_descale, *v_descale;
    i64 position;
    RowArray k_rows, v_rows;
    Factors k_descale_at, v_descale_at;
    Table cos_at, sin_at;
    IntegerStrides positions_at, cu_seqlens_at, block_table_at;
    // N: tokens of each sequence that is not packed. page: rows of a page; 0: no pages. pages: pages of all
    // sequences. capacity: rows of a sequence in the cache.
    i64 B, heads, tokens, N, capacity, page, pages, table_rows, interleaved, inverse;
};

// The source and target row of a token, its row in the tables, and its sequence.
struct Token {
    i64 from_b, from_n, to_b, to_n, position, sequence;
};

// Rotate a pair of columns. Each operation is rounded, as in NumPy.
__device__ inline void rotate(Accum& a, Accum& b, Accum cos, Accum sin) {
    const Accum x = a;
    a = difference(rounded_product(a, cos), rounded_product(b, sin));
    b = difference(rounded_product(b, cos), rounded_product(x, -sin));
}

template <class T>
__device__ inline void load_entries(Accum (&x)[VECTOR_SIZE], const void* data, i64 at, i64 step) {
#pragma unroll
    for (int e = 0; e < VECTOR_SIZE; ++e)
        x[e] = narrow<Accum>(widen(static_cast<const T*>(data)[at + e * step]));
}
__device__ inline void load_entries(Accum (&x)[VECTOR_SIZE], const void* data, const Table& table,
                                    i64 row, i64 pair) {
    const i64 at = row * table.n + pair * table.c;
    switch (table.bytes) {
        case 0: return load_entries<bfloat16>(x, data, at, table.c);
        case 2: return load_entries<float16>(x, data, at, table.c);
        case 4: return load_entries<float32>(x, data, at, table.c);
        default: return load_entries<float64>(x, data, at, table.c);
    }
}

// No kernel writes to these rows while they are read. If vectors have several elements, columns are
// contiguous.
__device__ inline Vector load_vector(const Element* __restrict__ row, i64 column, i64 step) {
    return *reinterpret_cast<const Vector*>(row + column * step);
}
__device__ inline void store_vector(Element* row, i64 column, i64 step, const Vector& vector) {
    *reinterpret_cast<Vector*>(row + column * step) = vector;
}

// Copy columns that are not rotated, for all heads of this CTA.
__device__ inline void copy_columns(const TokenParams& p, const RowArray& rows, const Element* from,
                                    Element* to, i64 column) {
#pragma unroll 4
    for (i64 h = blockIdx.y; h < p.heads; h += gridDim.y)
        store_vector(to + h * rows.to.h, column, rows.to.d,
                     load_vector(from + h * rows.from.h, column, rows.from.d));
}

// Two vectors: pairs of neighbours, or of an element of either.
__device__ inline void rotate_columns(const TokenParams& p, const RowArray& rows, const Element* from,
                                      Element* to, i64 position, i64 pair) {
    const i64 row = min(max(position, i64(0)), p.table_rows - 1);
    Accum cos[VECTOR_SIZE], sin[VECTOR_SIZE];
    load_entries(cos, p.cos, p.cos_at, row, pair);
    load_entries(sin, p.sin, p.sin_at, row, pair);
    const i64 first = p.interleaved ? 2 * pair : pair;
    const i64 second = p.interleaved ? first + VECTOR_SIZE : first + rows.pairs;
    for (i64 h = blockIdx.y; h < p.heads; h += gridDim.y) {
        Vector vectors[2] = {load_vector(from + h * rows.from.h, first, rows.from.d),
                             load_vector(from + h * rows.from.h, second, rows.from.d)};
        Element x[2 * VECTOR_SIZE];
#pragma unroll
        for (int e = 0; e < 2 * VECTOR_SIZE; ++e)
            x[e] = vectors[e / VECTOR_SIZE].x[e % VECTOR_SIZE];
        auto turn = [&](Element& one, Element& other, int e) {
            Accum a = widen(one), b = widen(other);
            rotate(a, b, cos[e], p.inverse ? -sin[e] : sin[e]);
            one = narrow<Element>(a), other = narrow<Element>(b);
        };
        if (p.interleaved) {
#pragma unroll
            for (int e = 0; e < VECTOR_SIZE; ++e) turn(x[2 * e], x[2 * e + 1], e);
        } else {
#pragma unroll
            for (int e = 0; e < VECTOR_SIZE; ++e) turn(x[e], x[VECTOR_SIZE + e], e);
        }
#pragma unroll
        for (int e = 0; e < 2 * VECTOR_SIZE; ++e)
            vectors[e / VECTOR_SIZE].x[e % VECTOR_SIZE] = x[e];
        store_vector(to + h * rows.to.h, first, rows.to.d, vectors[0]);
        store_vector(to + h * rows.to.h, second, rows.to.d, vectors[1]);
    }
}

// Write the rows of one array. find(t, token) finds the place of token t, or returns false if it has none.
template <class Find>
__device__ inline void write_rows(const TokenParams& p, const RowArray& rows, const void* from, void* to,
                                  Find find) {
    const int row_threads = int(rows.row_threads), own = int(threadIdx.x) / row_threads;
    const i64 t = blockIdx.x * i64(THREADS / row_threads) + own;
    Token token;
    if (own >= THREADS / row_threads || t >= p.tokens || !find(t, token)) return;
    const Element* const source = static_cast<const Element*>(from) + token.from_b * rows.from.b +
                                  token.from_n * rows.from.n;
    Element* const target =
        static_cast<Element*>(to) + token.to_b * rows.to.b + token.to_n * rows.to.n;
    // A thread takes vectors of columns: first of pairs, then of columns that are not rotated.
    const i64 step = row_threads * VECTOR_SIZE;
    for (i64 n = int(threadIdx.x) % row_threads * VECTOR_SIZE; n < rows.columns - rows.pairs; n += step)
        if (n < rows.pairs)
            rotate_columns(p, rows, source, target, token.position, n);
        else
            copy_columns(p, rows, source, target, n + rows.pairs);
}
