// Layer 2. Where the elements of a tile lie in shared memory, and who holds which in registers.
#pragma once

#include "copy.cuh"
#include "mma.cuh"

constexpr int WARP = 32;

// The map of an Atom's C: element e of lane (g, t).
struct Lane {
    int g, t;
    __device__ Lane() : g(threadIdx.x % WARP / 4), t(threadIdx.x % 4) {}
    __device__ int row(int e) const { return g + e / 2 * 8; }
    __device__ int column(int e) const { return 2 * t + e % 2; }
};

// ROWS x COLUMNS elements. Rows start 128 bytes apart or a multiple of that; the 16-byte chunks of
// a row are exchanged by a function of its number, so that neither eight rows of one chunk nor the
// fragments of wider types meet in one bank.
template <class T, int ROWS, int COLUMNS>
struct Tile {
    static constexpr int PITCH = (COLUMNS * int(sizeof(T)) + 127) / 128 * 128;
    static constexpr int BYTES = ROWS * PITCH;
    static constexpr int K = Atom<T>::K;

    char* base;

    __device__ static int swizzle(int row) {
        if constexpr (sizeof(T) == 2) return (row & 7) << 4;
        return ((row ^ row >> 2) & 1) << 6 | (row >> 1 & 1) << 5;
    }
    __device__ char* at(int row, int column) const {
        return base + row * PITCH + ((column * int(sizeof(T))) ^ swizzle(row));
    }
    // Two neighbours in a row; the column is even.
    struct alignas(2 * sizeof(T)) Pair {
        T x, y;
    };
    __device__ Pair& pair(int row, int column) const {
        return *reinterpret_cast<Pair*>(at(row, column));
    }
    __device__ T& element(int row, int column) const {
        return *reinterpret_cast<T*>(at(row, column));
    }

    // Begin to fill the tile from `rows` rows of `columns` elements; what is beyond becomes zero.
    template <int THREADS, int VECTOR>
    __device__ void load(const T* source, i64 stride, int rows, int columns) const {
        constexpr int SIZE = VECTOR < 4 ? 16 : VECTOR, CHUNKS = COLUMNS * int(sizeof(T)) / SIZE;
        const int bytes = columns * int(sizeof(T));
#pragma unroll
        for (int n = 0; n < (ROWS * CHUNKS + THREADS - 1) / THREADS; ++n) {
            const int i = threadIdx.x + n * THREADS, row = i / CHUNKS, byte = i % CHUNKS * SIZE;
            if (ROWS * CHUNKS % THREADS != 0 && i >= ROWS * CHUNKS) break;
            char* target = base + row * PITCH + (byte ^ swizzle(row));
            const int valid = row < rows ? min(max(bytes - byte, 0), SIZE) : 0;
            const char* from = reinterpret_cast<const char*>(source + (valid ? row : 0) * stride) +
                               (valid ? byte : 0);
            if constexpr (VECTOR >= 4) {
                copy_async<SIZE>(target, from, valid);
            } else {
                alignas(16) T chunk[SIZE / sizeof(T)];
#pragma unroll
                for (int e = 0; e < SIZE / int(sizeof(T)); ++e)
                    chunk[e] = e * int(sizeof(T)) < valid ? reinterpret_cast<const T*>(from)[e]
                                                          : T{};
                *reinterpret_cast<uint4*>(target) = *reinterpret_cast<uint4*>(chunk);
            }
        }
    }

    // Write `rows` rows of `columns` elements to global memory.
    template <int THREADS, int VECTOR>
    __device__ void store(T* target, i64 stride, int rows, int columns) const {
        constexpr int SIZE = VECTOR, CHUNKS = COLUMNS * int(sizeof(T)) / SIZE;
        struct alignas(SIZE) Chunk {
            char bytes[SIZE];
        };
        const int bytes = columns * int(sizeof(T));
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, byte = i % CHUNKS * SIZE;
            if (row >= rows || byte >= bytes) continue;
            const char* from = base + row * PITCH + (byte ^ swizzle(row));
            char* to = reinterpret_cast<char*>(target + row * stride) + byte;
            if (byte + SIZE <= bytes)
                *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<const Chunk*>(from);
            else
                for (int b = 0; b < bytes - byte; b += sizeof(T))
                    *reinterpret_cast<T*>(to + b) = *reinterpret_cast<const T*>(from + b);
        }
    }

    // A[m, k]: rows of the tile are m, its columns k.
    __device__ typename Atom<T>::A a(int m, int k) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            typename Atom<T>::A fragment;
            load_matrices(fragment.r, shared_address(at(m + lane % 16, k + lane / 16 * 8)));
            return fragment;
        } else {
            const Lane lane;
            const Pair low = pair(m + lane.g, k + 2 * lane.t);
            const Pair high = pair(m + lane.g + 8, k + 2 * lane.t);
            return Atom<T>::a_of({low.x, low.y, high.x, high.y});
        }
    }

    // A[m, k] of the transposed tile: rows of the tile are k, its columns m.
    __device__ typename Atom<T>::A a_transposed(int m, int k) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            typename Atom<T>::A fragment;
            load_matrices_transposed(
                fragment.r,
                shared_address(at(k + lane % 8 + lane / 16 * 8, m + lane / 8 % 2 * 8)));
            return fragment;
        } else {
            const Lane lane;
            const int k0 = k + 2 * lane.t, m0 = m + lane.g;
            return Atom<T>::a_of({element(k0, m0), element(k0 + 1, m0), element(k0, m0 + 8),
                                  element(k0 + 1, m0 + 8)});
        }
    }

    // B[k, n] for n and n + 8: rows of the tile are n, its columns k.
    __device__ void b(typename Atom<T>::B (&fragments)[2], int k, int n) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            u32 r[4];
            load_matrices(
                r, shared_address(at(n + lane % 8 + lane / 16 * 8, k + lane / 8 % 2 * 8)));
            fragments[0] = {r[0], r[1]};
            fragments[1] = {r[2], r[3]};
        } else {
            const Lane lane;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Pair x = pair(n + 8 * i + lane.g, k + 2 * lane.t);
                fragments[i] = Atom<T>::b_of(x.x, x.y);
            }
        }
    }

    // B[k, n] for n and n + 8: rows of the tile are k, its columns n.
    __device__ void b_transposed(typename Atom<T>::B (&fragments)[2], int k, int n) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            u32 r[4];
            load_matrices_transposed(r, shared_address(at(k + lane % 16, n + lane / 16 * 8)));
            fragments[0] = {r[0], r[1]};
            fragments[1] = {r[2], r[3]};
        } else {
            const Lane lane;
#pragma unroll
            for (int i = 0; i < 2; ++i)
                fragments[i] = Atom<T>::b_of(element(k + 2 * lane.t, n + 8 * i + lane.g),
                                             element(k + 2 * lane.t + 1, n + 8 * i + lane.g));
        }
    }
};

// Accumulators of MT x NT atoms: rows 16 * MT, columns 8 * NT.
template <class S, int MT, int NT>
struct Fragment {
    S x[MT][NT][4];

    __device__ void clear() {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[m][n][e] = 0;
    }
};

// k-step `step` of a product whose A are accumulators of an earlier one.
template <class T, class S, int NT>
__device__ inline typename Atom<T>::A a_of(const S (&x)[NT][4], int step) {
    if constexpr (sizeof(T) == 2)
        return Atom<T>::a_of(x[2 * step], x[2 * step + 1]);
    else
        return Atom<T>::a_of(x[step]);
}

// c[m, n] += sum over k of x[m, k] y[n, k], for DEPTH columns of both tiles.
template <int DEPTH, class T, int R, int C, int R2, int C2, class S, int MT, int NT>
__device__ inline void multiply(Fragment<S, MT, NT>& c, const Tile<T, R, C>& x, int m0,
                                const Tile<T, R2, C2>& y, int n0) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += Atom<T>::K) {
        typename Atom<T>::A a[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) a[m] = x.a(m0 + 16 * m, k);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            typename Atom<T>::B b[2];
            y.b(b, k, n0 + 8 * n);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) Atom<T>::mma(c.x[m][n + i], a[m], b[i]);
        }
    }
}

// c[m, n] += sum over k of x[m, k] y[k, n]: x are accumulators, y a tile from column n0 on.
template <class T, int R, int C, class S, int MT, int KT, int NT>
__device__ inline void multiply(Fragment<S, MT, NT>& c, const Fragment<S, MT, KT>& x,
                                const Tile<T, R, C>& y, int n0) {
#pragma unroll
    for (int k = 0; k < 8 * KT; k += Atom<T>::K) {
        typename Atom<T>::A a[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) a[m] = a_of<T>(x.x[m], k / Atom<T>::K);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            typename Atom<T>::B b[2];
            y.b_transposed(b, k, n0 + 8 * n);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) Atom<T>::mma(c.x[m][n + i], a[m], b[i]);
        }
    }
}

// c[m, n] += sum over k of x[k, m] y[k, n] (TRANSPOSED) or x[m, k] y[k, n], for DEPTH rows of y.
template <bool TRANSPOSED, int DEPTH, class T, int R, int C, int R2, int C2, class S, int MT,
          int NT>
__device__ inline void multiply_rows(Fragment<S, MT, NT>& c, const Tile<T, R, C>& x, int m0,
                                     const Tile<T, R2, C2>& y, int n0) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += Atom<T>::K) {
        typename Atom<T>::A a[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m)
            a[m] = TRANSPOSED ? x.a_transposed(m0 + 16 * m, k) : x.a(m0 + 16 * m, k);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            typename Atom<T>::B b[2];
            y.b_transposed(b, k, n0 + 8 * n);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) Atom<T>::mma(c.x[m][n + i], a[m], b[i]);
        }
    }
}

// Write accumulators to a tile, in its element type.
template <class T, int R, int C, class S, int MT, int NT>
__device__ inline void store_fragment(const Tile<T, R, C>& tile, const Fragment<S, MT, NT>& c,
                                      int m0, int n0) {
    const Lane lane;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; e += 2)
                tile.pair(m0 + 16 * m + lane.row(e), n0 + 8 * n + 2 * lane.t) = {
                    narrow<T>(c.x[m][n][e]), narrow<T>(c.x[m][n][e + 1])};
}
