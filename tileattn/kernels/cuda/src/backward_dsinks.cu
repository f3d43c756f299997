// dsinks: the sum of -exp(sink - lse) * delta over all queries of a head, in a fixed order, by one CTA for
// each head. The powers of two of the stored lse and delta cancel. Mirrors sink_gradient in spec.py.
#include "head.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_dsinks(const __grid_constant__ Params p) {
    overlap_launches();
    __shared__ Accum sums[THREADS / WARP];
    const i64 h = blockIdx.x;
    const Accum sink = sink_of(p, h);
    Accum total = 0;
    for (i64 b = 0; b < p.entries; ++b) {
        const Sequence sequence(p, b);
        const i64 first = sequence.padded_row(p, h);
        const bool large = head_flags(p, b, h / p.group) & LARGE_SCORES;
        for (i64 row = first + threadIdx.x; row < first + sequence.Nq; row += THREADS) {
            const Accum row_max = large ? static_cast<const Accum*>(p.row_max)[row] : Accum(0);
            const Accum above = sink_above(sink, row_max, Accum(p.softmax_scale));
            total -= exp2_of(difference(above, static_cast<const Accum*>(p.lse_log2)[row])) *
                     static_cast<const Accum*>(p.delta)[row];
        }
    }
    total = warp_sum(total);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = total;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < THREADS / WARP; ++w) total += sums[w];
    // A sink of -infinity has probability 0, also if delta is NaN.
    static_cast<Accum*>(p.dsinks)[h] = sink == -infinity<Accum>() ? Accum(0) : total;
}
