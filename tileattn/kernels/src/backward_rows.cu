// Before the backward pass: delta = rowsum(dout * out) - dlse, and the logsumexp in units of log 2,
// 0 in place of -infinity. A few lanes take each query. Mirrors _delta in numpy_backward.py.
// Heads are padded to whole blocks of queries, so that those are read without looking.
#include "rows.cuh"

constexpr int LANES = lanes_of_row(VALUE_DIM);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    backward_rows(const __grid_constant__ Params p) {
    const i64 row = i64(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    const i64 last = min(row, p.B * p.Hq * p.rows - 1);  // all lanes stay: they exchange sums
    const int bh = int(last / p.rows), i = int(last % p.rows);
    const int b = bh / int(p.Hq), h = bh % int(p.Hq);
    Sum delta = 0;
    if (i < p.Nq) {
        const Element* out = rows_of<Element>(p.out, p.out_at, b, h) + i * p.out_at.n;
        const Element* dout = rows_of<Element>(p.dout, p.dout_at, b, h) + i * p.dout_at.n;
        for (int d = threadIdx.x % LANES * PIECE; d < p.Dv; d += LANES * PIECE) {
            const Piece<Element> x = read_piece(out + d, int(p.Dv) - d);
            const Piece<Element> y = read_piece(dout + d, int(p.Dv) - d);
#pragma unroll
            for (int e = 0; e < PIECE; ++e)
                delta = fma(Sum(widen(x.values[e])), Sum(widen(y.values[e])), delta);
        }
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
    if (threadIdx.x % LANES || last < row) return;
    // Past the end a probability of zero.
    Sum shift = infinity<Sum>();
    if (i < p.Nq) {
        if (p.dlse) delta -= rows_of<Sum>(p.dlse, p.dlse_at, b, h)[i * p.dlse_at.n];
        const Sum lse = static_cast<const Sum*>(p.lse)[bh * p.Nq + i];
        shift = lse == -infinity<Sum>() ? Sum(0) : lse * LOG2_E;
    }
    static_cast<Sum*>(p.delta)[row] = delta;
    static_cast<Sum*>(p.shift)[row] = shift;
}
