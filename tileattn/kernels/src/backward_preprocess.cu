// Before the backward pass: delta = rowsum(dO * O) - dlse, and the logsumexp of base 2, 0 in place
// of -infinity. A few lanes take each query. Mirrors preprocess in spec.py. Rows of a head, or of a
// packed sequence, are padded to whole blocks of queries, so that those are loaded without bounds
// checks. Heads are flagged here: the statistics of the others are finite, and exact enough for P.
#include "rows.cuh"

// More lanes would repeat what is done once a row.
constexpr int VECTORS = lanes_of_row(VALUE_DIM) < 4 ? lanes_of_row(VALUE_DIM) : 4;  // of a lane
constexpr int LANES = lanes_of_row(VALUE_DIM) / VECTORS, ROWS = THREADS / LANES;
static_assert(ROW_PAD % ROWS == 0, "a CTA has rows of one head and sequence");

// The rounding of a larger logsumexp would show in the gradients.
constexpr Accum MAX_EXACT_LSE = sizeof(Element) == 2 ? 512 : 16;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_preprocess(const __grid_constant__ Params p) {
    overlap_launches();
    const int blocks = int(p.rows / ROWS), bh = int(blockIdx.x) / blocks;
    const int padded = int(blockIdx.x) % blocks * ROWS + int(threadIdx.x) / LANES;
    const HeadBlock<ROW_PAD> at(p, p.query_ends(), int(p.Hq), bh, padded / ROW_PAD);
    const int b = at.b, h = at.h, i = at.block * ROW_PAD + padded % ROW_PAD;
    const Sequence sequence(p, b);
    Accum delta = 0, lse = 0;
    if (i < sequence.Nq) {
        lse = static_cast<const Accum*>(p.lse)[sequence.row(p, h) + i];
        const Element* out = sequence.queries<Element>(p.out, p.out_at, h) + i * p.out_at.n;
        const Element* dout = sequence.queries<Element>(p.dout, p.dout_at, h) + i * p.dout_at.n;
        const int columns = int(p.Dv), d0 = threadIdx.x % LANES * VECTOR_SIZE;
        auto add = [&](auto load) {
            for (int first = d0; first < columns; first += VECTORS * LANES * VECTOR_SIZE) {
                Vector<Element> x[VECTORS], y[VECTORS];
#pragma unroll
                for (int n = 0; n < VECTORS; ++n) {
                    const int d = first + n * LANES * VECTOR_SIZE;
                    x[n] = load(out + d, columns - d), y[n] = load(dout + d, columns - d);
                }
#pragma unroll
                for (int n = 0; n < VECTORS; ++n)
#pragma unroll
                    for (int e = 0; e < VECTOR_SIZE; ++e)
                        delta = fma(Accum(widen(x[n].values[e])), Accum(widen(y[n].values[e])), delta);
            }
        };
        // Without branches all loads are under way at once.
        if (columns % VECTOR_SIZE)
            add([](const Element* x, int count) { return load_vector(x, count); });
        else
            add([](const Element* x, int count) {
                return count > 0 ? *reinterpret_cast<const Vector<Element>*>(x) : Vector<Element>{};
            });
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
    // Past the end P is zero.
    Accum lse_log2 = infinity<Accum>();
    u32 found = 0;
    if (i < sequence.Nq) {
        if (p.dlse) delta -= sequence.queries<Accum>(p.dlse, p.dlse_at, h)[i * p.dlse_at.n];
        const bool masked_out = lse == -infinity<Accum>();
        if (!is_finite(delta)) delta = infinity<Accum>() - infinity<Accum>(), found |= NON_FINITE;
        if (masked_out ? !is_finite_row<LANES>(
                             sequence.queries<Element>(p.q, p.q_at, h) + i * p.q_at.n, int(p.D))
                       : !is_finite(lse))
            found |= NON_FINITE;
        if (is_finite(lse) && fabs(lse) > MAX_EXACT_LSE) found |= LARGE;
        lse_log2 = masked_out ? Accum(0) : is_finite(lse) ? clip_finite(lse * LOG2_E) : lse;
    }
    // All rows of a CTA are of one head and sequence. One thread flags it, and only if no other has: atomics of
    // all rows would contend.
    if (__syncthreads_or(found)) {
        const bool non_finite = __syncthreads_or(found & NON_FINITE);
        const bool large = __syncthreads_or(found & LARGE);
        const u32 marks = (non_finite ? NON_FINITE : 0) | (large ? LARGE : 0);
        u32& known = head_flags(p, b, h / int(p.group));
        if (threadIdx.x == 0 && marks & ~*static_cast<volatile u32*>(&known))
            atomicOr(&known, marks);
    }
    if (threadIdx.x % LANES) return;
    const i64 row = bh * p.rows + padded;
    static_cast<Accum*>(p.delta)[row] = delta;
    static_cast<Accum*>(p.lse_log2)[row] = lse_log2;
    // backward_large_scores replaces it, if there are keys at all.
    static_cast<Accum*>(p.row_max)[row] = 0;
}
