// Before the backward pass: delta = rowsum(dout * out) - dlse, and the logsumexp in units of log 2,
// 0 in place of -infinity. A few lanes take some queries. Mirrors _delta in numpy_backward.py.
// Heads are padded to whole blocks of queries, so that those are read without looking.
#include "rows.cuh"

constexpr int LANES = lanes_of_row(VALUE_DIM);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    backward_rows(const __grid_constant__ Params p) {
    const LaneRows<LANES> at(p, int(blockIdx.x), int(p.rows));
    const Element* out = rows_of<Element>(p.out, p.out_at, at.b, at.h);
    const Element* dout = rows_of<Element>(p.dout, p.dout_at, at.b, at.h);
    Sum delta[ROWS_OF_LANES] = {};
    auto multiply = [&](auto read) {
        for (int d = at.piece; d < p.Dv; d += LANES * PIECE) {
            Piece<Element> x[ROWS_OF_LANES], y[ROWS_OF_LANES];
#pragma unroll
            for (int n = 0; n < ROWS_OF_LANES; ++n) {
                const i64 i = at.row(n);
                const int count = i < p.Nq ? int(p.Dv) - d : 0;
                x[n] = read(out + i * p.out_at.n + d, count);
                y[n] = read(dout + i * p.dout_at.n + d, count);
            }
#pragma unroll
            for (int n = 0; n < ROWS_OF_LANES; ++n)
#pragma unroll
                for (int e = 0; e < PIECE; ++e)
                    delta[n] =
                        fma(Sum(widen(x[n].values[e])), Sum(widen(y[n].values[e])), delta[n]);
        }
    };
    if (p.Dv % PIECE)
        multiply([](const Element* source, int count) { return read_piece(source, count); });
    else
        multiply([](const Element* source, int count) { return read_whole(source, count > 0); });
    const i64 head = i64(at.b) * p.Hq + at.h;
#pragma unroll
    for (int n = 0; n < ROWS_OF_LANES; ++n) {
#pragma unroll
        for (int step = LANES / 2; step; step /= 2)
            delta[n] += __shfl_xor_sync(~0u, delta[n], step);
        if (threadIdx.x % LANES) continue;
        const i64 i = at.row(n);
        // Past the end a probability of zero.
        Sum shift = infinity<Sum>();
        if (i < p.Nq) {
            if (p.dlse) delta[n] -= rows_of<Sum>(p.dlse, p.dlse_at, at.b, at.h)[i * p.dlse_at.n];
            const Sum lse = static_cast<const Sum*>(p.lse)[head * p.Nq + i];
            shift = lse == -infinity<Sum>() ? Sum(0) : lse * LOG2_E;
        }
        static_cast<Sum*>(p.delta)[head * p.rows + i] = delta[n];
        static_cast<Sum*>(p.shift)[head * p.rows + i] = shift;
    }
}
