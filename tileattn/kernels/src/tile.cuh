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

    char* base;
    u32 address;  // the same, as instructions on shared memory take it

    __device__ explicit Tile(char* base) : base(base), address(shared_address(base)) {}

    __device__ static int swizzle(int row) {
        if constexpr (sizeof(T) == 2) return (row & 7) << 4;
        return ((row ^ row >> 2) & 1) << 6 | (row >> 1 & 1) << 5;
    }
    // Bytes from the base of an element, or of the 16-byte chunk that begins with it.
    __device__ static int at(int row, int column) {
        return row * PITCH + ((column * int(sizeof(T))) ^ swizzle(row));
    }
    // The same for (row + down, column + right). Steps are constants: down a multiple of 8 rows,
    // right below SPAN columns, of which `column` is a multiple but for a lane's own. Then most of
    // it is computed once for all steps.
    template <int SPAN>
    __device__ static int at(int row, int column, int down, int right) {
        constexpr int BYTES = SPAN * int(sizeof(T));
        if constexpr (BYTES % 128 == 0 || (BYTES & (BYTES - 1)) == 0) {
            const int byte = column * int(sizeof(T)), step = right * int(sizeof(T));
            const int pattern = (byte & 127) ^ swizzle(row);
            return row * PITCH + (byte & ~127) + down * PITCH + (step & ~127) +
                   (pattern ^ (step & 127));
        }
        return at(row + down, column + right);
    }
    // Two neighbours in a row; the column is even.
    struct alignas(2 * sizeof(T)) Pair {
        T x, y;
    };
    __device__ Pair& pair(int offset) const { return *reinterpret_cast<Pair*>(base + offset); }
    __device__ T& element(int offset) const { return *reinterpret_cast<T*>(base + offset); }

    // Begin to fill the tile from `rows` rows of `columns` elements; what is beyond becomes zero.
    template <int THREADS, int VECTOR>
    __device__ void load(const T* source, i64 stride, int rows, int columns) const {
        constexpr int SIZE = VECTOR < 4 ? 16 : VECTOR, CHUNKS = COLUMNS * int(sizeof(T)) / SIZE;
        constexpr int STEP = THREADS / CHUNKS;  // rows that all threads together fill at a time
        if constexpr (VECTOR >= 4 && THREADS % CHUNKS == 0 && STEP % 8 == 0 && ROWS % STEP == 0) {
            // A thread stays in one column, and its rows are swizzled alike.
            const int row = threadIdx.x / CHUNKS, byte = threadIdx.x % CHUNKS * SIZE;
            const int inside = min(max(columns * int(sizeof(T)) - byte, 0), SIZE);
            const char* from = reinterpret_cast<const char*>(source + row * stride) + byte;
            const i64 step = STEP * int(sizeof(T)) * stride;
            const u32 to = address + row * PITCH + (byte ^ swizzle(row));
            if (rows >= ROWS && inside == SIZE) {
#pragma unroll
                for (int n = 0; n < ROWS / STEP; ++n, from += step)
                    copy_async<SIZE>(to + n * STEP * PITCH, from);
            } else {
#pragma unroll
                for (int n = 0; n < ROWS / STEP; ++n, from += step)
                    copy_async<SIZE>(to + n * STEP * PITCH, from,
                                     row + n * STEP < rows ? inside : 0);
            }
        } else {
#pragma unroll 4
            for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
                const int row = i / CHUNKS, byte = i % CHUNKS * SIZE;
                const int inside = min(max(columns * int(sizeof(T)) - byte, 0), SIZE);
                const char* from = reinterpret_cast<const char*>(source + row * stride) + byte;
                const int to = row * PITCH + (byte ^ swizzle(row)), valid = row < rows ? inside : 0;
                if constexpr (VECTOR >= 4) {
                    copy_async<SIZE>(address + to, from, valid);
                } else {
                    alignas(16) T chunk[SIZE / sizeof(T)];
#pragma unroll
                    for (int e = 0; e < SIZE / int(sizeof(T)); ++e)
                        chunk[e] = e * int(sizeof(T)) < valid ? reinterpret_cast<const T*>(from)[e]
                                                              : T{};
                    *reinterpret_cast<uint4*>(base + to) = *reinterpret_cast<uint4*>(chunk);
                }
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

    // Zero what is not finite, and mark the rows in which it was.
    template <int THREADS>
    __device__ void clean(bool (&marks)[ROWS]) const {
        for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
            T& x = element(at(i / COLUMNS, i % COLUMNS));
            if (!is_finite(widen(x))) x = T{}, marks[i / COLUMNS] = true;
        }
    }

    // Operands of atoms. Each takes where a warp's share begins, and constant steps from there.

    // A[m, k]: rows of the tile are m, its columns k.
    __device__ typename Atom<T>::A a(int m0, int m, int k) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            typename Atom<T>::A fragment;
            load_matrices(fragment.r,
                          address + at<128>(m0 + lane % 16, lane / 16 * 8, m, k));
            return fragment;
        } else {
            const Lane lane;
            T c[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int e = 0; e < 4; e += 2) {
                    const Pair x = pair(at<128>(m0 + lane.g, 2 * lane.t, m + 4 * e, k + 8 * i));
                    c[i][e] = x.x, c[i][e + 1] = x.y;
                }
            return Atom<T>::a_of(c);
        }
    }

    // A[m, k]: rows of the tile are k, its columns m, of which a warp has SPAN.
    template <int SPAN>
    __device__ typename Atom<T>::A a_transposed(int m0, int m, int k) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            typename Atom<T>::A fragment;
            load_matrices_transposed(
                fragment.r, address + at<SPAN>(lane % 8 + lane / 16 * 8, m0 + lane / 8 % 2 * 8, k,
                                               m));
            return fragment;
        } else {
            const Lane lane;
            T c[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    c[i][e] = element(at<SPAN>(2 * lane.t + e % 2, m0 + lane.g, k + 8 * i,
                                               m + e / 2 * 8));
            return Atom<T>::a_of(c);
        }
    }

    // B[k, n] for n and n + 8: rows of the tile are n, its columns k.
    __device__ void b(typename Atom<T>::B (&fragments)[2], int n0, int n, int k) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            u32 r[4];
            load_matrices(r, address + at<128>(n0 + lane % 8 + lane / 16 * 8,
                                                   lane / 8 % 2 * 8, n, k));
            fragments[0] = {r[0], r[1]};
            fragments[1] = {r[2], r[3]};
        } else {
            const Lane lane;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Pair x = pair(at<128>(n0 + lane.g, 2 * lane.t, n + 8 * i, k));
                const Pair y = pair(at<128>(n0 + lane.g, 2 * lane.t, n + 8 * i, k + 8));
                fragments[i] = Atom<T>::b_of(x.x, x.y, y.x, y.y);
            }
        }
    }

    // B[k, n] for n and n + 8: rows of the tile are k, its columns n, of which a warp has SPAN.
    template <int SPAN>
    __device__ void b_transposed(typename Atom<T>::B (&fragments)[2], int n0, int n, int k) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            u32 r[4];
            load_matrices_transposed(r,
                                     address + at<SPAN>(lane % 16, n0 + lane / 16 * 8, k, n));
            fragments[0] = {r[0], r[1]};
            fragments[1] = {r[2], r[3]};
        } else {
            const Lane lane;
            auto x = [&](int i, int j) {
                return element(at<SPAN>(2 * lane.t + j % 2, n0 + lane.g, k + j / 2 * 8, n + 8 * i));
            };
#pragma unroll
            for (int i = 0; i < 2; ++i)
                fragments[i] = Atom<T>::b_of(x(i, 0), x(i, 1), x(i, 2), x(i, 3));
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

    __device__ bool all_finite() const {
        bool finite = true;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) finite = finite && is_finite(x[m][n][e]);
        return finite;
    }

    // Multiply each row by its factor; nothing is done where all of a warp are 1.
    __device__ void scale_rows(const S (&factors)[MT][2]) {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            if (__all_sync(~0u, factors[m][0] == 1 && factors[m][1] == 1)) continue;
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[m][n][e] *= factors[m][e / 2];
        }
    }
};

// Products of a warp's share, which begins at (m0, n0): m0 is a multiple of its 16 * MT rows, n0 of
// its 8 * NT columns.

// c[m, n] += sum over k of x[m, k] y[n, k], for DEPTH columns of both tiles.
template <int DEPTH, class T, int R, int C, int R2, int C2, class S, int MT, int NT>
__device__ inline void multiply(Fragment<S, MT, NT>& c, const Tile<T, R, C>& x, int m0,
                                const Tile<T, R2, C2>& y, int n0) {
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        typename Atom<T>::A a[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) a[m] = x.a(m0, 16 * m, k);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            typename Atom<T>::B b[2];
            y.b(b, n0, 8 * n, k);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) Atom<T>::mma(c.x[m][n + i], a[m], b[i]);
        }
    }
}

// What a product without a callback calls.
struct Nothing {
    __device__ void operator()(int) const {}
};

// c[m, n] += sum over k of x[m, k] y[k, n]: x are accumulators, y a tile from column n0 on. Atoms
// k and k + 1 of x are as finish(k) leaves them.
template <class T, int R, int C, class S, int MT, int KT, int NT, class Finish = Nothing>
__device__ inline void multiply(Fragment<S, MT, NT>& c, const Fragment<S, MT, KT>& x,
                                const Tile<T, R, C>& y, int n0, Finish finish = {}) {
#pragma unroll
    for (int k = 0; k < 8 * KT; k += 16) {
        finish(k / 8);
        typename Atom<T>::A a[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) a[m] = Atom<T>::a_of(x.x[m] + k / 8);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            typename Atom<T>::B b[2];
            y.template b_transposed<8 * NT>(b, n0, 8 * n, k);
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
    for (int k = 0; k < DEPTH; k += 16) {
        typename Atom<T>::A a[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m)
            a[m] = TRANSPOSED ? x.template a_transposed<16 * MT>(m0, 16 * m, k)
                              : x.a(m0, 16 * m, k);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            typename Atom<T>::B b[2];
            y.template b_transposed<8 * NT>(b, n0, 8 * n, k);
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i) Atom<T>::mma(c.x[m][n + i], a[m], b[i]);
        }
    }
}

// Write accumulators to a tile, in its element type, where a warp's share begins as above.
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
                tile.pair(Tile<T, R, C>::template at<8 * NT>(m0 + lane.g, n0 + 2 * lane.t,
                                                             16 * m + 4 * e, 8 * n)) = {
                    narrow<T>(c.x[m][n][e]), narrow<T>(c.x[m][n][e + 1])};
}

// Zero what is not finite in tiles of the same rows, and say in which rows it was; everybody calls.
template <int THREADS, int ROWS, class... Tiles>
__device__ __noinline__ void clean_tiles(bool (&marks)[ROWS], const Tiles&... tiles) {
    __syncthreads();
    for (int row = threadIdx.x; row < ROWS; row += THREADS) marks[row] = false;
    __syncthreads();
    (tiles.template clean<THREADS>(marks), ...);
    __syncthreads();
}

// Begin to copy a row of N numbers.
template <int THREADS, class S, int N>
__device__ inline void copy_row(S (&row)[N], const S* source) {
    constexpr int CHUNK = 16 / sizeof(S);
    static_assert(N % CHUNK == 0 && N / CHUNK <= THREADS, "a chunk of 16 bytes for each thread");
    const int n = threadIdx.x * CHUNK;
    if (n < N)
        copy_async<16>(shared_address(row + n), reinterpret_cast<const char*>(source + n));
}

// Where add_rows puts a column: what a lane holds of two neighbouring atoms lies together.
__device__ inline int added_column(int column) {
    return column / 16 * 16 + column % 8 / 2 * 4 + column % 16 / 8 * 2 + column % 2;
}

// Add accumulators to rows in global memory, the first `rows` of which there are.
template <class S, int MT, int NT>
__device__ inline void add_rows(S* target, int stride, const Fragment<S, MT, NT>& c, int m0, int n0,
                                int rows) {
    const Lane lane;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const int row = m0 + 16 * m + lane.row(e);
            S* const to = target + row * stride + n0 + 4 * lane.t;
            if (row < rows)
#pragma unroll
                for (int n = 0; n < NT; n += 2)
                    add_global(to + 8 * n, c.x[m][n][e], c.x[m][n][e + 1], c.x[m][n + 1][e],
                               c.x[m][n + 1][e + 1]);
        }
}
