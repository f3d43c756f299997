// Layer 3. Rows of arrays read and written by a few lanes each, in pieces of up to 16 bytes.
#pragma once

#include "plain.cuh"

constexpr int PIECE_BYTES = VECTOR < int(sizeof(Element)) ? int(sizeof(Element)) : VECTOR;
constexpr int PIECE = PIECE_BYTES / int(sizeof(Element));  // elements of a piece

template <class T>
struct alignas(PIECE * sizeof(T) > 16 ? 16 : PIECE * sizeof(T)) Piece {
    T values[PIECE];
};

// As many lanes as a row has pieces, rounded up to a power of two that divides a warp.
constexpr int lanes_of_row(int columns) {
    int lanes = 1;
    while (lanes < WARP && lanes * PIECE < columns) lanes *= 2;
    return lanes;
}

// The first `count` elements of a piece, zeros behind them.
__device__ inline Piece<Element> read_piece(const Element* source, int count) {
    if (count >= PIECE) return *reinterpret_cast<const Piece<Element>*>(source);
    Piece<Element> piece = {};
#pragma unroll
    for (int e = 0; e < PIECE; ++e)
        if (e < count) piece.values[e] = source[e];
    return piece;
}
// In words, by hand: the compiler would merge parts of it with the stores of shorter pieces.
template <class T>
__device__ inline void write_whole(T* target, const Piece<T>& piece) {
    if constexpr (sizeof(piece) >= 8) {
        u64 words[sizeof(piece) / 8];
        memcpy(words, &piece, sizeof(piece));
        if constexpr (sizeof(piece) == 16)
            asm volatile("st.global.v2.b64 [%0], {%1, %2};" ::"l"(target), "l"(words[0]),
                         "l"(words[1])
                         : "memory");
        else
            asm volatile("st.global.b64 [%0], %1;" ::"l"(target), "l"(words[0]) : "memory");
    } else {
        *reinterpret_cast<Piece<T>*>(target) = piece;
    }
}
__device__ inline void write_piece(Element* target, const Piece<Element>& piece, int count) {
    if (count >= PIECE)
        write_whole(target, piece);
    else
#pragma unroll
        for (int e = 0; e < PIECE; ++e)
            if (e < count) target[e] = piece.values[e];
}
