// Before the backward pass: delta = rowsum(dO * O) - dlse, and the logsumexp of base 2, 0 in place
// of -infinity. A few lanes take some queries, whose rows they load before they use one. Mirrors
// preprocess in spec.py. Rows of a head, or of a packed sequence, are padded to whole blocks of
// queries, so that those are loaded without bounds checks. Heads are flagged here: the statistics of
// the others are finite, and exact enough for P.
#include "rows.cuh"

constexpr int LANES = lanes_of_row(VALUE_DIM), GROUPS = THREADS / LANES;
constexpr int TOGETHER = ROW_PAD / GROUPS < 4 ? ROW_PAD / GROUPS : 4;  // rows of a group of lanes
constexpr int ROWS = TOGETHER * GROUPS;
static_assert(ROW_PAD % ROWS == 0, "a CTA has rows of one head and sequence");

// The rounding of a larger logsumexp would show in the gradients.
constexpr Accum MAX_EXACT_LSE = sizeof(Element) == 2 ? 512 : 16;

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_preprocess(const __grid_constant__ Params p) {
    const int blocks = int(p.rows / ROWS), bh = int(blockIdx.x) / blocks;
    const int padded = int(blockIdx.x) % blocks * ROWS;
    const HeadBlock<ROW_PAD> at(p, p.cu_seqlens_q, int(p.Hq), bh, padded / ROW_PAD);
    const int b = at.b, h = at.h;
    const int first = at.block * ROW_PAD + padded % ROW_PAD + int(threadIdx.x) / LANES;
    const Sequence sequence(p, b);
    const Element* const out = sequence.queries<Element>(p.out, p.out_at, h);
    const Element* const dout = sequence.queries<Element>(p.dout, p.dout_at, h);
    Accum delta[TOGETHER] = {}, lse[TOGETHER];
#pragma unroll
    for (int n = 0; n < TOGETHER; ++n) {
        const int i = first + n * GROUPS;
        if (i < sequence.Nq) lse[n] = static_cast<const Accum*>(p.lse)[sequence.row(p, h) + i];
    }
    for (int d = threadIdx.x % LANES * VECTOR_SIZE; d < p.Dv; d += LANES * VECTOR_SIZE) {
        Vector<Element> x[TOGETHER] = {}, y[TOGETHER] = {};
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
            const int i = first + n * GROUPS;
            if (i >= sequence.Nq) continue;
            x[n] = load_vector(out + i * p.out_at.n + d, int(p.Dv) - d);
            y[n] = load_vector(dout + i * p.dout_at.n + d, int(p.Dv) - d);
        }
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n)
#pragma unroll
            for (int e = 0; e < VECTOR_SIZE; ++e)
                delta[n] = fma(Accum(widen(x[n].values[e])), Accum(widen(y[n].values[e])), delta[n]);
    }
    u32 found = 0;
#pragma unroll
    for (int n = 0; n < TOGETHER; ++n) {
        const int i = first + n * GROUPS;
#pragma unroll
        for (int step = LANES / 2; step; step /= 2)
            delta[n] += __shfl_xor_sync(~0u, delta[n], step);
        // Past the end P is zero.
        Accum lse_log2 = infinity<Accum>();
        if (i < sequence.Nq) {
            if (p.dlse) delta[n] -= sequence.queries<Accum>(p.dlse, p.dlse_at, h)[i * p.dlse_at.n];
            const bool masked_out = lse[n] == -infinity<Accum>();
            if (!is_finite(delta[n]))
                delta[n] = infinity<Accum>() - infinity<Accum>(), found |= NON_FINITE;
            if (masked_out ? !is_finite_row<LANES>(
                                 sequence.queries<Element>(p.q, p.q_at, h) + i * p.q_at.n, int(p.D))
                           : !is_finite(lse[n]))
                found |= NON_FINITE;
            if (is_finite(lse[n]) && fabs(lse[n]) > MAX_EXACT_LSE) found |= LARGE;
            lse_log2 = masked_out ? Accum(0) : is_finite(lse[n]) ? clip_finite(lse[n] * LOG2_E) : lse[n];
        }
        if (threadIdx.x % LANES == 0) {
            const i64 row = i64(bh) * p.rows + padded + n * GROUPS + threadIdx.x / LANES;
            static_cast<Accum*>(p.delta)[row] = delta[n];
            static_cast<Accum*>(p.lse_log2)[row] = lse_log2;
            // backward_large_scores replaces it, if there are keys at all.
            static_cast<Accum*>(p.row_max)[row] = 0;
        }
    }
    // All rows of a CTA are of one head and sequence. One thread flags it, and only if no other has:
    // atomics of all rows would contend.
    if (__syncthreads_or(found)) {
        const bool non_finite = __syncthreads_or(found & NON_FINITE);
        const bool large = __syncthreads_or(found & LARGE);
        const u32 marks = (non_finite ? NON_FINITE : 0) | (large ? LARGE : 0);
        u32& known = head_flags(p, b, h / int(p.group));
        if (threadIdx.x == 0 && marks & ~*static_cast<volatile u32*>(&known))
            atomicOr(&known, marks);
    }
}
