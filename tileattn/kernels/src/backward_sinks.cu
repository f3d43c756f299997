// Gradient at the sinks, one block for each head: the sum of -exp(sink - lse) * delta, in a fixed
// order. Mirrors _sink_gradient in numpy_backward.py.
#include "plain.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    backward_sinks(const __grid_constant__ Params p) {
    __shared__ Sum sums[THREADS / WARP];
    const i64 h = blockIdx.x;
    const Sum sink = sink_of(p, h);
    Sum total = 0;
    for (i64 n = threadIdx.x; n < p.B * p.Nq; n += THREADS) {
        const i64 b = n / p.Nq, row = (b * p.Hq + h) * p.rows + n % p.Nq;
        const bool large = special(p, b, h / p.group) & LARGE;
        const Sum row_max = large ? static_cast<const Sum*>(p.row_max)[row] : Sum(0);
        const Sum above = sink_above(sink, row_max, Sum(p.natural));  // it may be all of the shift
        total -= exp2_of(difference(above, static_cast<const Sum*>(p.shift)[row])) *
                 static_cast<const Sum*>(p.delta)[row];
    }
    total = warp_sum(total);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = total;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < THREADS / WARP; ++w) total += sums[w];
    // A sink of -infinity takes no mass, whatever the queries hold.
    static_cast<Sum*>(p.dsinks)[h] = sink == -infinity<Sum>() ? Sum(0) : total;
}
