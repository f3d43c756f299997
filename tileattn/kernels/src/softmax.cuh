// Layer 3. Online softmax, the state of some rows while keys come in tile by tile: state.py's twin.
// Exponents are of base 2. Milakov and Gimelshein, arXiv:1805.02867.
#pragma once

#include "config.cuh"

// Over the four lanes that share a row.
__device__ inline Sum row_maximum(Sum x) {
    x = fmax(x, __shfl_xor_sync(~0u, x, 1));
    return fmax(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline Sum row_sum(Sum x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Infinity cannot be subtracted from itself: rows that saw nothing are shifted by 0.
__device__ inline Sum shift_of(Sum m) { return m == -infinity<Sum>() ? Sum(0) : m; }

template <int MT>
struct RowState {
    Sum m[MT][2];  // running maximum
    Sum l[MT][2];  // this lane's share of the sum of exp2(score - m)

    __device__ RowState() {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) m[i][half] = -infinity<Sum>(), l[i][half] = 0;
    }

    // Turn scores, in multiples of `unit`, into unnormalised probabilities; say by how much what
    // was summed before is to be rescaled.
    template <int NT>
    __device__ void absorb(Fragment<Sum, MT, NT>& s, Sum unit, Sum (&rescale)[MT][2]) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Sum largest = s.x[i][0][2 * half];
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e)
                        largest = fmax(largest, s.x[i][n][e]);
                const Sum maximum = fmax(m[i][half], row_maximum(largest) * unit);
                const Sum shift = shift_of(maximum);
                rescale[i][half] = exp2_of(m[i][half] - shift);
                m[i][half] = maximum;
                Sum total = 0;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        s.x[i][n][e] = exp2_of(fma(s.x[i][n][e], unit, -shift));
                        total += s.x[i][n][e];
                    }
                l[i][half] = l[i][half] * rescale[i][half] + total;
            }
    }

    __device__ bool all_finite() const {
        bool finite = true;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) finite = finite && is_finite(l[i][half]);
        return finite;
    }

    // Let a logit join the denominator, and divide: the weight of the sums, and the logsumexp.
    __device__ Sum finish(int i, int half, Sum sink, Sum gain, Sum& lse) {
        const Sum old = m[i][half], maximum = fmax(old, sink), shift = shift_of(maximum);
        const Sum rescale = exp2_of(old - shift);
        const Sum total = row_sum(l[i][half]) * rescale + exp2_of(sink - shift);
        lse = (maximum + log2_of(total)) * LN_2;
        return total == 0 ? Sum(0) : gain / total * rescale;
    }
};
