// Layer 2. Products of a warpgroup: its accumulators are a Fragment, 16 rows of each warp.
#pragma once

#include "box_sm90.cuh"
#include "fragment.cuh"

// Accumulators as the instruction takes them: the elements of one atom after the other.
template <int NT>
__device__ inline float (&registers_of(Fragment<float, 1, NT>& c))[4 * NT] {
    return reinterpret_cast<float(&)[4 * NT]>(c.x);
}

// Begin c[m, n] = sum over k of x[m, k] y[n, k], for 64 rows of x from row m0 on and DEPTH columns.
template <class T, int DEPTH, int R, int C, int R2, int C2, int NT>
__device__ inline void begin_product(Fragment<float, 1, NT>& c, const BoxTile<R, C>& x, int m0,
                                     const BoxTile<R2, C2>& y) {
    auto& d = registers_of(c);
    wgmma_forget(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) wgmma(T{}, d, x.by_rows(m0, k), y.by_rows(0, k), k > 0);
    wgmma_commit();
}

// Begin c[m, n] += sum over k of a[m, k] y[k, n], for all rows of y.
template <class T, int K, int R, int C, int NT>
__device__ inline void begin_product(Fragment<float, 1, NT>& c, const typename Atom<T>::A (&a)[K],
                                     const BoxTile<R, C>& y) {
    static_assert(16 * K == R);
    auto& d = registers_of(c);
    wgmma_keep(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; ++k) wgmma(T{}, d, a[k].r, y.by_columns(16 * k), true);
    wgmma_commit();
}

// Begin c[m, n] = sum over k of x[m, k] y[k, n], for 64 rows of x from row m0 on, all rows of y,
// and the columns of y from n0 on.
template <class T, int R, int C, int C2, int NT>
__device__ inline void begin_product_of_rows(Fragment<float, 1, NT>& c, const BoxTile<R, C>& x,
                                             int m0, const BoxTile<C, C2>& y, int n0) {
    auto& d = registers_of(c);
    wgmma_forget(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C; k += 16) wgmma(T{}, d, x.by_rows(m0, k), y.by_columns(k, n0), k > 0);
    wgmma_commit();
}

// Wait until at most PENDING of the youngest products are under way; c is that of an older one.
template <int PENDING, int NT>
__device__ inline void end_product(Fragment<float, 1, NT>& c) {
    wgmma_wait<PENDING>();
    wgmma_keep(registers_of(c));
}

// Have the next wait come behind what tells a condition, which never holds. The assembler moves waits
// ahead of all that does not depend on products, which would then not go on meanwhile; ahead of a branch
// it does not.
__device__ inline void hold_back(bool never) {
    if (__any_sync(~0u, never)) asm volatile("nanosleep.u32 1;");
}

// Write 16 rows of each warp to global memory, of which there are `rows`, and of a thread's two those
// whose bit is set in `halves`. Two lanes that hold two columns each of two neighbouring atoms exchange
// them, so that each has four of one: 8 bytes, and a row 32.
template <class T, int NT>
__device__ inline void store_rows(T* target, i64 stride, const Fragment<float, 1, NT>& c, int rows,
                                  int columns, u32 halves = 3) {
    const Lane lane;
    const bool odd = lane.t & 1;
    const int column = (odd ? 8 : 0) + lane.t / 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 x[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n)
            x[n] = pack<T>(c.x[0][n][2 * half], c.x[0][n][2 * half + 1]);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            const u32 got = __shfl_xor_sync(~0u, odd ? x[n] : x[n + 1], 1);
            (odd ? x[n] : x[n + 1]) = got;
        }
        const int row = lane.row(2 * half);
        T* const to = target + row * stride + column;
#pragma unroll
        for (int n = 0; n < NT; n += 2)
            if (row < rows && 8 * n + column < columns && (halves >> half & 1))
                *reinterpret_cast<uint2*>(to + 8 * n) = {x[n], x[n + 1]};
    }
}

// The same by way of shared memory of each warp: 64 columns of its rows after the other, whose
// chunks of 16 bytes are exchanged as in a BoxTile. A warp writes four whole pieces of 128 bytes at
// once; columns come by eight.
constexpr int STAGED_BYTES = 16 * 128;
template <class T, int NT>
__device__ inline void stage_rows(u32 staged, T* target, i64 stride, const Fragment<float, 1, NT>& c,
                                  int rows, int columns) {
    static_assert(NT % 8 == 0);
    int lane;  // where it is read anew, what follows from it is not kept all the while
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    const int row0 = lane / 8, column0 = lane % 8 * 8;
    T* const to = target + row0 * stride + column0;
#pragma unroll
    for (int n0 = 0; n0 < NT; n0 += 8) {
        __syncwarp();  // what was there before is read
#pragma unroll
        for (int i = 0; i < 4; ++i)
            store_matrices(staged + lane % 16 * 128 + ((2 * i + lane / 16) ^ lane % 8) * 16,
                           Atom<T>::a_of(c.x[0] + n0 + 2 * i).r);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; i += 4)
            copy_piece(to + i * stride + 8 * n0,
                       staged + (row0 + i) * 128 + (lane ^ (row0 + i)) % 8 * 16,
                       row0 + i < rows && 8 * n0 + column0 < columns);
    }
}

// Write 16 rows of each warp, the first of them `row`, to the columns of a tile whose rows are the
// columns of it, that is, transposed, as operands of products.
template <class T, int R, int C, int K>
__device__ inline void store_operands(const BoxTile<R, C>& tile, const typename Atom<T>::A (&a)[K],
                                      int row) {
    static_assert(R == 16 * K);
    using Box = BoxTile<R, C>;
    const int lane = threadIdx.x % WARP;
    const int to = lane % 8 + lane / 16 * 8, chunk = row % Box::WIDTH / 8 + lane / 8 % 2;
    const u32 first = tile.address + row / Box::WIDTH * Box::SLICE + to * Box::PITCH +
                      (chunk ^ to % 8) * 16;
#pragma unroll
    for (int i = 0; i < K; ++i) store_matrices_transposed(first + 16 * i * Box::PITCH, a[i].r);
}

// Write 16 rows of each warp, and of them some of the columns, to rows in shared memory of as many
// floats, from this row on, a multiple of 16.
template <int COLUMNS, int NT>
__device__ inline void store_sums(u32 target, const Fragment<float, 1, NT>& c, int first, int row) {
    static_assert(COLUMNS % 32 == 0);
    const Lane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 to = target + (row + lane.row(2 * half)) * COLUMNS * 4;
#pragma unroll
        for (int n = first / 8; n < (first + COLUMNS) / 8; n += 2) {
            const int at = stored_column(lane.g, 8 * n - first + 4 * lane.t);
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + 4 * at),
                         "f"(c.x[0][n][2 * half]), "f"(c.x[0][n][2 * half + 1]),
                         "f"(c.x[0][n + 1][2 * half]), "f"(c.x[0][n + 1][2 * half + 1])
                         : "memory");
        }
    }
}

// Write accumulators for the thread of the same place in another warpgroup, which reads them.
template <int NT>
__device__ inline void hand_over(u32 target, const Fragment<float, 1, NT>& c) {
    const u32 to = target + threadIdx.x % (4 * WARP) * 16;
#pragma unroll
    for (int n = 0; n < NT; ++n)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + 64 * WARP * n),
                     "f"(c.x[0][n][0]), "f"(c.x[0][n][1]), "f"(c.x[0][n][2]), "f"(c.x[0][n][3])
                     : "memory");
}
template <int NT>
__device__ inline void take_over(Fragment<float, 1, NT>& c, u32 source) {
    const u32 from = source + threadIdx.x % (4 * WARP) * 16;
#pragma unroll
    for (int n = 0; n < NT; ++n)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(c.x[0][n][0]), "=f"(c.x[0][n][1]), "=f"(c.x[0][n][2]),
                       "=f"(c.x[0][n][3])
                     : "r"(from + 64 * WARP * n)
                     : "memory");
}
