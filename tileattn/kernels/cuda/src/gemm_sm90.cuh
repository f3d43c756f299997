// Layer 2. Asynchronous GEMMs of a warpgroup, and stores of its accumulator fragments to shared and global
// memory. A fragment has 16 rows of each warp.
#pragma once

#include "fragment.cuh"
#include "smem_tile_sm90.cuh"

// An accumulator fragment as wgmma takes it: the elements of one atom after the other.
template <int NT>
__device__ inline float (&accum_registers(Fragment<float, 1, NT>& c))[4 * NT] {
    return reinterpret_cast<float (&)[4 * NT]>(c.x);
}

// Issue C = X Y^T for 64 rows of x from row m0 on, rows of y from n0 on and DEPTH columns: both
// operands are K-major.
template <class T, int DEPTH, int R, int C, int R2, int C2, int NT>
__device__ inline void gemm_async(Fragment<float, 1, NT>& c, const SmemTile<R, C>& x, int m0,
                                  const SmemTile<R2, C2>& y, int n0 = 0) {
    auto& d = accum_registers(c);
    discard_operand(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) wgmma(T{}, d, x.k_major(m0, k), y.k_major(n0, k), k > 0);
    wgmma_commit();
}

// Issue C = A Y^T, or with ADD C += A Y^T, for all rows of y: A is in registers, Y^T is K-major.
template <class T, bool ADD = false, int K, int R, int C, int NT>
__device__ inline void gemm_async_k(Fragment<float, 1, NT>& c, const typename Atom<T>::A (&a)[K],
                                    const SmemTile<R, C>& y) {
    static_assert(16 * K == C);
    auto& d = accum_registers(c);
    if constexpr (ADD)
        fence_operand(d);
    else
        discard_operand(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; ++k) wgmma(T{}, d, a[k].r, y.k_major(0, 16 * k), ADD || k > 0);
    wgmma_commit();
}

// Issue C += A Y for all rows of y, or for steps begin to end - 1 of 16 rows: A is in registers, Y is
// MN-major.
template <class T, int K, int R, int C, int NT>
__device__ inline void gemm_async(Fragment<float, 1, NT>& c, const typename Atom<T>::A (&a)[K],
                                  const SmemTile<R, C>& y, int begin = 0, int end = K) {
    static_assert(16 * K == R);
    auto& d = accum_registers(c);
    fence_operand(d);
    wgmma_fence();
#pragma unroll
    for (int k = begin; k < end; ++k) wgmma(T{}, d, a[k].r, y.mn_major(16 * k), true);
    wgmma_commit();
}

// Issue C = X Y for 64 rows of x from row m0 on, all rows of y, and columns of y from n0 on: X is
// K-major, Y is MN-major. If the columns after the first 64 are elsewhere, they start at `second`.
template <class T, int R, int C, int C2, int NT, class... Second>
__device__ inline void gemm_async_mn(Fragment<float, 1, NT>& c, const SmemTile<R, C>& x, int m0,
                                     const SmemTile<C, C2>& y, int n0, Second... second) {
    auto& d = accum_registers(c);
    discard_operand(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C; k += 16)
        wgmma(T{}, d, x.k_major(m0, k), y.mn_major(k, n0, second...), k > 0);
    wgmma_commit();
}

// Issue C = X^T Y^T, or with ADD C += X^T Y^T, for 64 columns of x from column m0 on and all rows of y: X^T is
// MN-major, Y^T is K-major.
template <class T, bool ADD = false, int K, int C, int R2, int NT>
__device__ inline void gemm_async_transposed(Fragment<float, 1, NT>& c, const SmemTile<K, C>& x,
                                             int m0, const SmemTile<R2, K>& y) {
    auto& d = accum_registers(c);
    if constexpr (ADD)
        fence_operand(d);
    else
        discard_operand(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K; k += 16) wgmma(T{}, d, x.mn_major(k, m0), y.k_major(0, k), ADD || k > 0);
    wgmma_commit();
}

// Wait until at most PENDING GEMMs are in flight. c is the result of one that is complete then.
template <int PENDING, int NT>
__device__ inline void warpgroup_wait(Fragment<float, 1, NT>& c) {
    wgmma_wait<PENDING>();
    fence_operand(accum_registers(c));
}

// Some atoms of a fragment, from number `first` on.
template <int COUNT, int NT>
__device__ inline Fragment<float, 1, COUNT>& atoms(Fragment<float, 1, NT>& c, int first) {
    return reinterpret_cast<Fragment<float, 1, COUNT>&>(c.x[0][first]);
}

// Store one of a thread's two rows to global memory, straight from registers, if `wanted`. Two lanes exchange
// columns of neighbouring atoms, so that each stores four of one: 8 bytes, and 32 of a row.
template <class T, int NT>
__device__ inline void store_row(T* row, const Fragment<float, 1, NT>& c, int half, int columns,
                                 bool wanted) {
    const Lane lane;
    const bool odd = lane.t & 1;
    const int column = (odd ? 8 : 0) + lane.t / 2 * 4;
    u32 x[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) x[n] = pack<T>(c.x[0][n][2 * half], c.x[0][n][2 * half + 1]);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
        const u32 got = __shfl_xor_sync(~0u, odd ? x[n] : x[n + 1], 1);
        (odd ? x[n] : x[n + 1]) = got;
    }
#pragma unroll
    for (int n = 0; n < NT; n += 2)
        if (wanted && 8 * n + column < columns)
            *reinterpret_cast<uint2*>(row + column + 8 * n) = {x[n], x[n + 1]};
}

// Store 16 rows of each warp: the first `rows`, and of a thread's two rows those whose bit is set in
// `halves`.
template <class T, int NT>
__device__ inline void store_rows(T* target, i64 stride, const Fragment<float, 1, NT>& c, int rows,
                                  int columns, u32 halves = 3) {
    const Lane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane.row(2 * half);
        store_row(target + row * stride, c, half, columns, row < rows && halves >> half & 1);
    }
}

// The same through swizzled staging memory of the warp, 64 columns at a time: a warp stores four
// whole 128-byte lines at once. There is a multiple of eight columns.
constexpr int STAGING_BYTES = 16 * 128;
template <class T, int NT>
__device__ inline void store_rows_staged(u32 staged, T* target, i64 stride,
                                         const Fragment<float, 1, NT>& c, int rows, int columns) {
    u32 lane;  // read again here, so that values that depend on it are not kept in registers until now
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    // The lower bits of the staging address are zero, so that addresses of other chunks differ by an
    // exclusive or.
    const u32 write = staged + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
    const u32 row0 = lane / 8, read = staged + row0 * 128 + (row0 ^ lane % 8) * 16;
    const int column0 = lane % 8 * 8;
    T* to[4] = {target + row0 * stride + column0};
#pragma unroll
    for (int i = 1; i < 4; ++i) to[i] = to[i - 1] + 4 * stride;
#pragma unroll
    for (int n0 = 0; n0 < NT; n0 += 8) {
        __syncwarp();  // the previous columns have been read
#pragma unroll
        for (int i = 0; i < 4 && n0 + 2 * i < NT; ++i)
            store_matrices(write ^ 32 * i, Atom<T>::a_of(c.x[0] + n0 + 2 * i).r);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i)
            store_chunk(to[i] + 8 * n0, (read ^ i % 2 * 64) + i * 512,
                        int(row0) + 4 * i < rows && 8 * n0 + column0 < columns);
    }
}

// Store 16 rows of each warp transposed: to columns of the tile from `row` on. All rows of the tile, or
// steps begin to end - 1 of 16 rows.
template <class T, int R, int C, int K>
__device__ inline void store_transposed(const SmemTile<R, C>& tile,
                                        const typename Atom<T>::A (&a)[K], int row, int begin = 0,
                                        int end = K) {
    static_assert(R == 16 * K);
    using Box = SmemTile<R, C>;
    const int lane = threadIdx.x % WARP;
    const int to = lane % 8 + lane / 16 * 8, chunk = row % Box::WIDTH / 8 + lane / 8 % 2;
    const u32 first =
        tile.address + row / Box::WIDTH * Box::SLICE + to * Box::PITCH + (chunk ^ to % 8) * 16;
#pragma unroll
    for (int i = begin; i < end; ++i)
        store_matrices_transposed(first + 16 * i * Box::PITCH, a[i].r);
}

// Stage 16 rows of each warp, columns `first` to first + COLUMNS - 1, in shared memory: rows of floats from
// `row` on, a multiple of 16.
template <int COLUMNS, int NT>
__device__ inline void stage_dq(u32 target, const Fragment<float, 1, NT>& c, int first, int row) {
    static_assert(COLUMNS % 32 == 0);
    const Lane lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 to = target + (row + lane.row(2 * half)) * COLUMNS * 4;
#pragma unroll
        for (int n = first / 8; n < (first + COLUMNS) / 8; n += 2) {
            const int at = dq_column(lane.g, 8 * n - first + 4 * lane.t);
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + 4 * at),
                         "f"(c.x[0][n][2 * half]), "f"(c.x[0][n][2 * half + 1]),
                         "f"(c.x[0][n + 1][2 * half]), "f"(c.x[0][n + 1][2 * half + 1])
                         : "memory");
        }
    }
}

// Stage 16 rows of each warp of a transposed dQ in shared memory: as columns from `column` on, of rows of
// 64 floats, or of 32 if there are no more columns.
template <int NT>
__device__ inline void stage_transposed_dq(u32 target, const Fragment<float, 1, NT>& c, int column,
                                           int columns) {
    if (columns < 64 && column >= columns) return;
    const Lane lane;
    const int row = 2 * lane.t;
    const u32 to = target + (row * columns + transposed_dq_column(row, column + lane.g)) * 4;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + (8 * n + e) * columns * 4),
                         "f"(c.x[0][n][e]), "f"(c.x[0][n][e + 2])
                         : "memory");
}

// Pass a fragment through shared memory to the same thread of another warpgroup: 16 bytes of each atom.
constexpr int EXCHANGE_PITCH = 4 * WARP * 16;
__device__ inline u32 exchange_slot(u32 tile) { return tile + threadIdx.x % (4 * WARP) * 16; }
template <int NT>
__device__ inline void store_exchange(u32 target, const Fragment<float, 1, NT>& c) {
    const u32 to = exchange_slot(target);
#pragma unroll
    for (int n = 0; n < NT; ++n)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + EXCHANGE_PITCH * n),
                     "f"(c.x[0][n][0]), "f"(c.x[0][n][1]), "f"(c.x[0][n][2]), "f"(c.x[0][n][3])
                     : "memory");
}
template <int NT>
__device__ inline void load_exchange(Fragment<float, 1, NT>& c, u32 source) {
    const u32 from = exchange_slot(source);
#pragma unroll
    for (int n = 0; n < NT; ++n)
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(c.x[0][n][0]), "=f"(c.x[0][n][1]), "=f"(c.x[0][n][2]),
                       "=f"(c.x[0][n][3])
                     : "r"(from + EXCHANGE_PITCH * n)
                     : "memory");
}
