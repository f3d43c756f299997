// Layer 2. Tiles in shared memory: their swizzle, and how lanes load operand fragments from them.
#pragma once

#include "copy.cuh"
#include "mma.cuh"

// The layout of an Atom's C: element e of lane (g, t).
struct Lane {
    int g, t;
    __device__ Lane() : g(threadIdx.x % WARP / 4), t(threadIdx.x % 4) {}
    __device__ int row(int e) const { return g + e / 2 * 8; }
    __device__ int column(int e) const { return 2 * t + e % 2; }
};

__device__ constexpr int power_of_two_from(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

// ROWS x COLUMNS elements. The pitch of rows is 64 bytes, or a multiple of 128. The 16-byte chunks of a row
// are swizzled by its number, so that neither ldmatrix nor loads of wider elements have bank conflicts.
template <class T, int ROWS, int COLUMNS>
struct Tile {
    static constexpr int ROW_BYTES = COLUMNS * int(sizeof(T));
    static constexpr int PITCH = ROW_BYTES <= 64 ? 64 : (ROW_BYTES + 127) / 128 * 128;
    static constexpr int BYTES = ROWS * PITCH;

    char* base;
    u32 address;  // the same in the shared window

    __device__ explicit Tile(char* base) : base(base), address(shared_address(base)) {}

    // PART of its rows, from `row` on: a multiple of 8.
    template <int PART>
    __device__ Tile<T, PART, COLUMNS> part(int row) const {
        return Tile<T, PART, COLUMNS>(base + row * PITCH);
    }

    // Linear: swizzle(a + b) == swizzle(a) ^ swizzle(b) if a and b have no common bit.
    __device__ static constexpr int swizzle(int row) {
        if (PITCH == 64) return sizeof(T) <= 2 ? (row >> 1 & 3) << 4 : (row >> 1 & 1) << 5;
        if (sizeof(T) <= 2) return (row & 7) << 4;
        return ((row ^ row >> 2) & 1) << 6 | (row >> 1 & 1) << 5;
    }
    // The offset in bytes of an element.
    __device__ static int at(int row, int column) {
        return row * PITCH + ((column * int(sizeof(T))) ^ swizzle(row));
    }
    // The offset of (row + down, column + right), for steps known at compile time: `down` is a multiple of
    // 8, and `right` is below SPAN. `column` is a multiple of SPAN plus a lane's own column. Then most of
    // the address is computed once for all steps.
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

    // Start asynchronous copies of `rows` rows of `columns` elements. The rest of the tile becomes zero. A
    // small UNROLL needs few registers.
    template <int THREADS, int ALIGNMENT_BYTES, int UNROLL = 32>
    __device__ void load(const T* source, i64 stride, int rows, int columns,
                         u32 thread = threadIdx.x) const {
        constexpr int SIZE = ALIGNMENT_BYTES < 4 ? 16 : ALIGNMENT_BYTES, CHUNKS = ROW_BYTES / SIZE;
        constexpr int LANES = power_of_two_from(CHUNKS);  // threads of a row
        constexpr int STEP = THREADS / LANES;  // rows that all threads copy at a time
        if constexpr (ALIGNMENT_BYTES >= 4 && STEP > 0 && ROWS % STEP == 0 &&
                      (ROWS / STEP <= UNROLL || UNROLL < 32)) {
            // Each thread copies one column of chunks, and reuses the address of its first row.
            const int row = thread / LANES, byte = thread % LANES * SIZE;
            if (byte >= ROW_BYTES) return;
            const int inside = min(max(columns * int(sizeof(T)) - byte, 0), SIZE);
            const char* from = reinterpret_cast<const char*>(source + row * stride) + byte;
            const i64 step = STEP * int(sizeof(T)) * stride;
            auto to = [&](int n) {
                return address + row * PITCH + (byte ^ swizzle(row) ^ swizzle(n * STEP)) +
                       n * STEP * PITCH;
            };
            if (rows >= ROWS && inside == SIZE) {
#pragma unroll UNROLL
                for (int n = 0; n < ROWS / STEP; ++n, from += step) copy_async<SIZE>(to(n), from);
            } else {
#pragma unroll UNROLL
                for (int n = 0; n < ROWS / STEP; ++n, from += step) {
                    const int valid = row + n * STEP < rows ? inside : 0;
                    if constexpr (SIZE == int(sizeof(T)))
                        copy_async_if<SIZE>(to(n), from, valid > 0);
                    else
                        copy_async<SIZE>(to(n), from, valid);
                }
            }
        } else {
            load_rows<THREADS, ALIGNMENT_BYTES, UNROLL < 4 ? 1 : 4>([=](int row) { return source + row * stride; },
                                                rows, columns, thread);
        }
    }

    // The same, with source(row) as the address of each row. Whole warps call.
    template <int THREADS, int ALIGNMENT_BYTES, int UNROLL = 4, class Source>
    __device__ void load_rows(Source source, int rows, int columns,
                              u32 thread = threadIdx.x) const {
        constexpr int SIZE = ALIGNMENT_BYTES < 4 ? 16 : ALIGNMENT_BYTES, CHUNKS = ROW_BYTES / SIZE;
#pragma unroll UNROLL
        for (int i = thread; i < ROWS * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, byte = i % CHUNKS * SIZE;
            const int inside = min(max(columns * int(sizeof(T)) - byte, 0), SIZE);
            const char* from = reinterpret_cast<const char*>(source(row)) + byte;
            const int to = row * PITCH + (byte ^ swizzle(row)), valid = row < rows ? inside : 0;
            if constexpr (ALIGNMENT_BYTES >= 4) {
                copy_async<SIZE>(address + to, from, valid);
            } else {
                alignas(16) T chunk[SIZE / sizeof(T)];
#pragma unroll
                for (int e = 0; e < SIZE / int(sizeof(T)); ++e)
                    chunk[e] =
                        e * int(sizeof(T)) < valid ? reinterpret_cast<const T*>(from)[e] : T{};
                *reinterpret_cast<uint4*>(base + to) = *reinterpret_cast<uint4*>(chunk);
            }
        }
    }

    // Store `rows` rows of `columns` elements to global memory.
    template <int THREADS, int ALIGNMENT_BYTES>
    __device__ void store(T* target, i64 stride, int rows, int columns,
                          u32 thread = threadIdx.x) const {
        constexpr int SIZE = ALIGNMENT_BYTES, CHUNKS = ROW_BYTES / SIZE;
        struct alignas(SIZE) Chunk {
            char bytes[SIZE];
        };
        const int bytes = columns * int(sizeof(T));
#pragma unroll 4
        for (int i = thread; i < ROWS * CHUNKS; i += THREADS) {
            const int row = i / CHUNKS, byte = i % CHUNKS * SIZE;
            if (row >= rows || byte >= bytes) continue;
            const char* from = base + row * PITCH + (byte ^ swizzle(row));
            char* to = reinterpret_cast<char*>(target + row * stride) + byte;
            if (byte + SIZE <= bytes)
                *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<const Chunk*>(from);
            else
#pragma unroll 1
                for (int b = 0; b < bytes - byte; b += sizeof(T))
                    *reinterpret_cast<T*>(to + b) = *reinterpret_cast<const T*>(from + b);
        }
    }

    // The address of a 16-byte chunk of a row.
    __device__ u32 chunk(int row, int byte) const {
        return address + row * PITCH + (byte ^ swizzle(row));
    }

    // Operands of atoms, at constant steps from the start of a warp's part. Of eight neighbours along k a
    // lane has two. AS_C: columns 2t and 2t + 1, as in C, which can be the other operand. Otherwise t and t
    // + 4: 8-byte numbers are loaded like this, one at a time, into the registers that the instruction
    // takes, without bank conflicts. Loaded in pairs, half of them would have to move.
    static constexpr bool IN_PAIRS = sizeof(T) < 8;
    template <bool AS_C>
    __device__ static int depth(int n) {
        return AS_C ? Lane().column(n) : Lane().t + 4 * n;
    }

    // Operand A[m, k] from a tile with rows m and columns k.
    __device__ typename Atom<T>::A a(int m0, int m, int k) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            typename Atom<T>::A fragment;
            load_matrices(fragment.r, address + at<128>(m0 + lane % 16, lane / 16 * 8, m, k));
            return fragment;
        } else {
            T c[2][4];
            read<false, 128, IN_PAIRS>(c, m0, m, k);
            return Atom<T>::a_of(c);
        }
    }

    // Operand A[m, k] from a tile with rows k and columns m, of which a warp has SPAN.
    template <int SPAN>
    __device__ typename Atom<T>::A a_transposed(int m0, int m, int k) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            typename Atom<T>::A fragment;
            load_matrices_transposed(fragment.r, address + at<SPAN>(lane % 8 + lane / 16 * 8,
                                                                    m0 + lane / 8 % 2 * 8, k, m));
            return fragment;
        } else {
            T c[2][4];
            read<true, SPAN, IN_PAIRS>(c, m0, m, k);
            return Atom<T>::a_of(c);
        }
    }

    // The same elements in the layout of C: two atoms, for columns k and k + 8.
    template <bool TRANSPOSED, int SPAN, bool AS_C = true>
    __device__ void read(T (&c)[2][4], int m0, int m, int k) const {
        if constexpr (sizeof(T) == 2) {
            const auto fragment = TRANSPOSED ? a_transposed<SPAN>(m0, m, k) : a(m0, m, k);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const u32 two = fragment.r[2 * i + e / 2];
                    c[i][e].bits = static_cast<unsigned short>(e % 2 ? two >> 16 : two);
                }
        } else {
            const Lane lane;
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int e = 0; e < 4; e += 2) {
                    if constexpr (TRANSPOSED || !AS_C) {
                        auto x = [&](int n) {
                            return element(
                                TRANSPOSED
                                    ? at<SPAN>(depth<AS_C>(n), m0 + lane.g, k + 8 * i, m + 4 * e)
                                    : at<128>(m0 + lane.g, depth<AS_C>(n), m + 4 * e, k + 8 * i));
                        };
                        c[i][e] = x(0), c[i][e + 1] = x(1);
                    } else {
                        const Pair x = pair(at<128>(m0 + lane.g, 2 * lane.t, m + 4 * e, k + 8 * i));
                        c[i][e] = x.x, c[i][e + 1] = x.y;
                    }
                }
        }
    }

    // Operands B[k, n] for n and n + 8, from a tile with rows n and columns k.
    __device__ void b(typename Atom<T>::B (&fragments)[2], int n0, int n, int k) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            u32 r[4];
            load_matrices(r,
                          address + at<128>(n0 + lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8, n, k));
            fragments[0] = {r[0], r[1]};
            fragments[1] = {r[2], r[3]};
        } else {
            const Lane lane;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if constexpr (IN_PAIRS) {
                    const Pair x = pair(at<128>(n0 + lane.g, 2 * lane.t, n + 8 * i, k));
                    const Pair y = pair(at<128>(n0 + lane.g, 2 * lane.t, n + 8 * i, k + 8));
                    fragments[i] = Atom<T>::b_of(x.x, x.y, y.x, y.y);
                } else {
                    auto x = [&](int j) {
                        return element(at<128>(n0 + lane.g, depth<false>(j % 2), n + 8 * i,
                                               k + j / 2 * 8));
                    };
                    fragments[i] = Atom<T>::b_of(x(0), x(1), x(2), x(3));
                }
            }
        }
    }

    // Operands B[k, n] for n and n + 8, from a tile with rows k and columns n, of which a warp has SPAN.
    template <int SPAN, bool AS_C = IN_PAIRS>
    __device__ void b_transposed(typename Atom<T>::B (&fragments)[2], int n0, int n, int k) const {
        if constexpr (sizeof(T) == 2) {
            const int lane = threadIdx.x % WARP;
            u32 r[4];
            load_matrices_transposed(r, address + at<SPAN>(lane % 16, n0 + lane / 16 * 8, k, n));
            fragments[0] = {r[0], r[1]};
            fragments[1] = {r[2], r[3]};
        } else {
            const Lane lane;
            auto x = [&](int i, int j) {
                return element(
                    at<SPAN>(depth<AS_C>(j % 2), n0 + lane.g, k + j / 2 * 8, n + 8 * i));
            };
#pragma unroll
            for (int i = 0; i < 2; ++i)
                fragments[i] = Atom<T>::b_of(x(i, 0), x(i, 1), x(i, 2), x(i, 3));
        }
    }
};

// Start to copy a row of N numbers.
template <int THREADS, class S, int N>
__device__ inline void copy_row(S (&row)[N], const S* source) {
    constexpr int CHUNK = 16 / sizeof(S);
    static_assert(N % CHUNK == 0 && N / CHUNK <= THREADS, "a chunk of 16 bytes for each thread");
    const int n = threadIdx.x * CHUNK;
    if (n < N) copy_async<16>(shared_address(row + n), reinterpret_cast<const char*>(source + n));
}
