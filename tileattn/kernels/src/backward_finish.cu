// After the backward pass over keys: dq in its own type and times the scale. A few lanes take each
// query.
#include "rows.cuh"

constexpr int LANES = lanes_of_row(HEAD_DIM);

// Two columns, the first of them even, stay neighbours among the sums.
constexpr int NEIGHBOURS = PIECE < 2 ? 1 : 2;
struct alignas(NEIGHBOURS * sizeof(Sum)) Neighbours {
    Sum sums[NEIGHBOURS];
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    backward_finish(const __grid_constant__ Params p) {
    const i64 row = i64(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    const i64 last = min(row, p.B * p.Hq * p.Nq - 1);  // all lanes stay: they look at rows together
    const int bh = int(last / p.Nq), i = int(last % p.Nq);
    const int b = bh / int(p.Hq), h = bh % int(p.Hq);
    const Sum* sum = static_cast<const Sum*>(p.dq_sum) + last * HEAD_DIM;
    Element* dq = rows_of<Element>(p.dq, p.dq_at, b, h) + i * p.dq_at.n;
    bool good = true;
    for (int d = threadIdx.x % LANES * PIECE; d < p.D; d += LANES * PIECE) {
        Piece<Element> piece;
#pragma unroll
        for (int e0 = 0; e0 < PIECE; e0 += NEIGHBOURS) {
            const auto found =
                *reinterpret_cast<const Neighbours*>(sum + added_column(d + e0));
#pragma unroll
            for (int e = 0; e < NEIGHBOURS; ++e) {
                const Sum x = found.sums[e] * Sum(p.scale);
                good = good && is_finite(x);
                piece.values[e0 + e] = narrow<Element>(x);
            }
        }
        if (last == row) write_piece(dq + d, piece, int(p.D) - d);
    }
    // Rows that are not finite, once more and textbook-like, by the whole warp, after all have
    // written.
    __syncwarp();
    constexpr u32 ROW = LANES == WARP ? ~0u : (1u << LANES) - 1;
    for (u32 bad = __ballot_sync(~0u, !good), lane; bad; bad &= ~(ROW << lane)) {
        lane = (__ffs(bad) - 1) / LANES * LANES;
        const int row_bh = __shfl_sync(~0u, bh, lane), row_i = __shfl_sync(~0u, i, lane);
        query_row(p, row_bh / int(p.Hq), row_bh % int(p.Hq), row_i);
    }
}
