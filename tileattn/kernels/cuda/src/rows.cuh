// Layer 3. Loads and stores of rows by a few lanes, in vectors of up to 16 bytes.
#pragma once

#include "head.cuh"

constexpr int VECTOR_BYTES =
    ALIGNMENT_BYTES < int(sizeof(Element)) ? int(sizeof(Element)) : ALIGNMENT_BYTES;
constexpr int VECTOR_SIZE = VECTOR_BYTES / int(sizeof(Element));  // elements of a vector

template <class T>
struct alignas(VECTOR_SIZE * sizeof(T) > 16 ? 16 : VECTOR_SIZE * sizeof(T)) Vector {
    T values[VECTOR_SIZE];
};

// The lanes of a row: one for each vector, rounded up to a power of two, at most a warp.
constexpr int lanes_of_row(int columns) {
    int lanes = 1;
    while (lanes < WARP && lanes * VECTOR_SIZE < columns) lanes *= 2;
    return lanes;
}

// A block of a query head, as HeadBlock finds it. All lanes of a warp call for the same one, and compare 32
// packed sequences at a time, since each comparison waits for memory.
template <int BLOCK, int MORE = 1>
__device__ inline HeadBlock<BLOCK, MORE> head_block(const Params& p, int head, int number) {
    using Block = HeadBlock<BLOCK, MORE>;
    if constexpr (!PACKED) return Block(p, p.query_ends(), int(p.Hq), head, number);
    const Integers ends = p.query_ends();
    int b = 0, end = int(p.entries);
    while (end - b > 1) {
        const int step = (end - b + WARP - 1) / WARP;
        const int probe = b + (int(threadIdx.x) % WARP + 1) * step;
        b += __popc(__ballot_sync(~0u, probe < end && Block::first(ends, probe) <= number)) * step;
        end = min(end, b + step);
    }
    return Block(b, head, max(0, number - Block::first(ends, b)));
}

// Load the first `count` elements of a vector, and zeros after them.
__device__ inline Vector<Element> load_vector(const Element* source, int count) {
    if (count >= VECTOR_SIZE) return *reinterpret_cast<const Vector<Element>*>(source);
    Vector<Element> vector = {};
#pragma unroll
    for (int e = 0; e < VECTOR_SIZE; ++e)
        if (e < count) vector.values[e] = source[e];
    return vector;
}
// Load the vector of a row at a column, or zeros past the last column. The columns are whole vectors. There is no
// branch, so that all loads of a loop are in flight at once.
__device__ inline Vector<Element> load_whole(const Element* row, int column, int columns) {
    return column < columns ? *reinterpret_cast<const Vector<Element>*>(row + column) : Vector<Element>{};
}

// Store a whole vector. In asm: the compiler would merge parts of it with the stores of shorter vectors.
template <class T>
__device__ inline void store_whole(T* target, const Vector<T>& vector) {
    if constexpr (sizeof(vector) == 16) {
        u32 words[4];
        memcpy(words, &vector, sizeof(vector));
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
    } else if constexpr (sizeof(vector) == 8) {
        u64 word;
        memcpy(&word, &vector, sizeof(vector));
        asm volatile("st.global.b64 [%0], %1;" ::"l"(target), "l"(word) : "memory");
    } else {
        *reinterpret_cast<Vector<T>*>(target) = vector;
    }
}
__device__ inline void store_vector(Element* target, const Vector<Element>& vector, int count) {
    if (count >= VECTOR_SIZE)
        store_whole(target, vector);
    else
#pragma unroll
        for (int e = 0; e < VECTOR_SIZE; ++e)
            if (e < count) target[e] = vector.values[e];
}

// True if the elements of a row that this lane, one of LANES, reads are finite.
template <int LANES>
__device__ inline bool is_finite_row(const Element* row, int columns) {
    bool finite = true;
    for (int d = threadIdx.x % LANES * VECTOR_SIZE; d < columns; d += LANES * VECTOR_SIZE) {
        const auto vector = load_vector(row + d, columns - d);
#pragma unroll
        for (const Element& x : vector.values) finite = finite && is_finite(widen(x));
    }
    return finite;
}
