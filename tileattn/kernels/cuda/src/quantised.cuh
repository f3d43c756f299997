// Layer 2. GEMMs of q and P with tiles of 8-bit keys and values, which become operands as they are loaded.
// Each 8-bit number is exact in float16. So is q of bfloat16 after a power of two for each row, but for elements
// below 2**-31 of the largest, which lose digits: far fewer than the sums of their products round off.
#pragma once

#include "fragment.cuh"

// With float16 operands a lane loads four neighbours at a time. So that these are its operands of one
// atom, both sides permute the columns: of q each 16 columns, and of out (`value_column`).
__device__ inline int query_column(int column) {
    const int within = column % 16;
    return column - within + within / 2 % 2 * 8 + within / 4 * 2 + within % 2;
}
template <class Operand>
__device__ inline int value_column(int column) {
    return sizeof(Operand) == 2 ? column / 16 * 16 + column % 8 * 2 + column / 8 % 2 : column;
}

// Convert four numbers. INTERLEAVED: the first register has numbers 0 and 2, the second 1 and 3.
template <bool INTERLEAVED>
__device__ inline void to_halves(u32 (&two)[2], u32 four, int8) {
    // The numbers plus 128, as the last bits of 1024 + n.
    four ^= 0x80808080;
    two[0] = __byte_perm(four, 0x64646464, INTERLEAVED ? 0x4240 : 0x4140);
    two[1] = __byte_perm(four, 0x64646464, INTERLEAVED ? 0x4341 : 0x4342);
#pragma unroll
    for (int i = 0; i < 2; ++i)
        asm("sub.f16x2 %0, %0, %1;" : "+r"(two[i]) : "r"(0x64806480));  // 1024 + 128
}
template <bool INTERLEAVED>
__device__ inline void to_halves(u32 (&two)[2], u32 four, float8_e4m3fn) {
#if __CUDA_ARCH__ >= 890
    if (INTERLEAVED) four = __byte_perm(four, 0, 0x3120);
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; "
        "cvt.rn.f16x2.e4m3x2 %1, high;}"
        : "=r"(two[0]), "=r"(two[1])
        : "r"(four));
#else
    two[0] = __byte_perm(four, 0, INTERLEAVED ? 0x2404 : 0x1404);
    two[1] = __byte_perm(four, 0, INTERLEAVED ? 0x3414 : 0x3424);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // The exponents of float16 begin 8 lower.
        const u32 sizes = two[i] & 0x7f007f00, nan = __vcmpeq2(sizes, 0x7f007f00);
        two[i] = (two[i] & 0x80008000) | sizes >> 1;
        asm("mul.f16x2 %0, %0, %1;" : "+r"(two[i]) : "r"(0x5c005c00));  // 256
        two[i] |= nan;
    }
#endif
}

// Operands B[k, n] of four atoms: two of 16 columns k for the keys from n0 on, two for the keys from n0 + 8 on.
template <class T, int R, int C>
__device__ inline void load_keys(Atom<float16>::B (&b)[2][2], const Tile<T, R, C>& y, int n0, int k0) {
    const int lane = threadIdx.x % WARP;
    u32 r[4];
    load_matrices(r, y.address + y.template at<128>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16, n0, k0));
#pragma unroll
    for (int i = 0; i < 4; ++i) to_halves<false>(b[i / 2][i % 2].r, r[i], T{});
}
template <class T, int R, int C>
__device__ inline void load_keys(Atom<float>::B (&b)[2][2], const Tile<T, R, C>& y, int n0, int k0) {
    const Lane lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        auto at = [&](int e) {
            const int column = k0 + i % 2 * 16 + e / 2 * 8 + lane.column(e % 2);
            return widen(y.element(y.at(n0 + i / 2 * 8 + lane.g, column)));
        };
        b[i / 2][i % 2] = Atom<float>::b_of(at(0), at(1), at(2), at(3));
    }
}

// Operands B[k, n] of four atoms: 16 values from k0 on, 32 columns from n0 on.
template <class T, int R, int C>
__device__ inline void load_values(Atom<float16>::B (&b)[4], const Tile<T, R, C>& y, int k0, int n0) {
    const int lane = threadIdx.x % WARP;
    u32 r[4];  // 16 columns of eight values, of the next eight values; then the next columns
    load_matrices_transposed(r, y.address + y.template at<128>(lane % 16, lane / 16 * 16, k0, n0));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 two[2];  // even columns, and odd ones
        to_halves<true>(two, r[i], T{});
        b[i / 2 * 2].r[i % 2] = two[0], b[i / 2 * 2 + 1].r[i % 2] = two[1];
    }
}
template <class T, int R, int C>
__device__ inline void load_values(Atom<float>::B (&b)[4], const Tile<T, R, C>& y, int k0, int n0) {
    const Lane lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        auto at = [&](int e) {
            return widen(y.element(y.at(k0 + e / 2 * 8 + lane.column(e % 2), n0 + 8 * i + lane.g)));
        };
        b[i] = Atom<float>::b_of(at(0), at(1), at(2), at(3));
    }
}

// C += X Y^T, for DEPTH columns of the queries X and of the keys Y.
template <int DEPTH, class Operand, class T, int R, int C, int R2, int C2, class S, int MT, int NT>
__device__ inline void multiply_keys(Fragment<S, MT, NT>& c, const Tile<Operand, R, C>& x, int m0,
                                     const Tile<T, R2, C2>& y) {
    if constexpr (sizeof(T) > 1) {
        multiply<DEPTH>(c, x, m0, y, 0);
    } else {
        static_assert(DEPTH % 32 == 0 && NT % 2 == 0, "a load of Y has 32 columns of 16 keys");
#pragma unroll(sizeof(Operand) == 2 ? DEPTH / 32 : 1)
        for (int k = 0; k < DEPTH; k += 32) {
            typename Atom<Operand>::A a[2][MT];
#pragma unroll
            for (int m = 0; m < 2 * MT; ++m) a[m / MT][m % MT] = x.a(m0, m % MT * 16, k + m / MT * 16);
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                typename Atom<Operand>::B b[2][2];
                load_keys(b, y, 8 * n, k);
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        Atom<Operand>::mma(c.x[m][n + i / 2], a[i % 2][m], b[i / 2][i % 2]);
            }
        }
    }
}

// C += X Y: X is a fragment of P, Y a tile of values. The columns of C are in the order of value_column.
template <class Operand, class T, int R, int C, class S, int MT, int KT, int NT>
__device__ inline void multiply_values(Fragment<S, MT, NT>& c, const Fragment<S, MT, KT>& x,
                                       const Tile<T, R, C>& y) {
    if constexpr (sizeof(T) > 1) {
        multiply(c, x, y, 0);
    } else {
        static_assert(NT % 4 == 0, "a load of Y has 32 columns of 16 values");
#pragma unroll
        for (int k = 0; k < KT; k += 2) {
            typename Atom<Operand>::A a[MT];
#pragma unroll
            for (int m = 0; m < MT; ++m) a[m] = Atom<Operand>::a_of(x.x[m] + k);
#pragma unroll
            for (int n = 0; n < NT; n += 4) {
                typename Atom<Operand>::B b[4];
                load_values(b, y, 8 * k, 8 * n);
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) Atom<Operand>::mma(c.x[m][n + i], a[m], b[i]);
            }
        }
    }
}
