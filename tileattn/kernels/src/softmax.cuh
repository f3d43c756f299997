// Layer 3. Online softmax, the state of some rows while keys come in tile by tile: state.py's twin.
// Exponents are of base 2. Milakov and Gimelshein, arXiv:1805.02867.
#pragma once

#include "config.cuh"

// The warps that share rows, each with a part of the columns: they meet at a barrier of their own.
struct RowGroup {
    int warp_m, warp_n, row0;  // this warp among rows and columns of warps, and its first row

    __device__ explicit RowGroup(int rows)
        : warp_m(threadIdx.x / WARP / WARPS_N),
          warp_n(threadIdx.x / WARP % WARPS_N),
          row0(warp_m * rows) {}

    __device__ void sync() const {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + warp_m), "n"(WARP * WARPS_N) : "memory");
    }

    // One array for all that is joined: each instance of a template would have one of its own.
    __device__ static auto& parts() {
        __shared__ Sum parts[WARPS_N][WARPS_N > 1 ? BLOCK_Q : 1];
        return parts;
    }

    // Combine what the four lanes of each row have, and then the warps. Between two calls everybody
    // meets.
    template <int MT, class Combine>
    __device__ void join(Sum (&x)[MT][2], Combine combine) const {
        const Lane lane;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Sum& mine = x[i][half];
                mine = combine(mine, __shfl_xor_sync(~0u, mine, 1));
                mine = combine(mine, __shfl_xor_sync(~0u, mine, 2));
                if (WARPS_N > 1 && lane.t == 0)
                    parts()[warp_n][row0 + 16 * i + lane.row(2 * half)] = mine;
            }
        if constexpr (WARPS_N == 1) return;
        sync();
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row0 + 16 * i + lane.row(2 * half);
                x[i][half] = parts()[0][row];
#pragma unroll
                for (int n = 1; n < WARPS_N; ++n)
                    x[i][half] = combine(x[i][half], parts()[n][row]);
            }
    }
};

// Infinity cannot be subtracted from itself: rows that saw nothing are shifted by 0.
__device__ inline Sum shift_of(Sum m) { return m == -infinity<Sum>() ? Sum(0) : m; }

template <int SLACK>
__device__ inline Sum raised(Sum m, Sum candidate) {
    return SLACK == 0 ? fmax(m, candidate) : candidate - m > SLACK ? candidate : m;
}

template <int MT>
struct RowState {
    Sum m[MT][2];  // running maximum, but for slack
    Sum l[MT][2];  // this lane's share of the sum of exp2(score - m)

    __device__ RowState() {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) m[i][half] = -infinity<Sum>(), l[i][half] = 0;
    }

    // Turn scores, in multiples of `unit`, into unnormalised probabilities; say by how much what
    // was summed before is to be rescaled. A maximum that exceeds what a row is shifted by, but
    // by no more than `SLACK`, leaves the shift as it is.
    template <int SLACK = 0, int NT>
    __device__ void absorb(Fragment<Sum, MT, NT>& s, Sum unit, const RowGroup& group,
                           Sum (&rescale)[MT][2]) {
        Sum largest[MT][2];
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Maxima of several parts: a single one would be a long chain.
                constexpr int PARTS = SLACK == 0 ? 1 : 4;
                Sum part[PARTS];
#pragma unroll
                for (int n = 0; n < PARTS; ++n) part[n] = s.x[i][n][2 * half];
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e)
                        part[n % PARTS] = fmax(part[n % PARTS], s.x[i][n][e]);
                largest[i][half] = part[0];
#pragma unroll
                for (int n = 1; n < PARTS; ++n)
                    largest[i][half] = fmax(largest[i][half], part[n]);
            }
        group.join(largest, [](Sum x, Sum y) { return fmax(x, y); });
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Sum maximum = raised<SLACK>(m[i][half], largest[i][half] * unit);
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

    // Sum over all lanes of a row: before `finish`.
    __device__ void gather(const RowGroup& group) {
        group.join(l, [](Sum x, Sum y) { return x + y; });
    }

    // Let a logit join the denominator, and divide: the weight of the sums, and the logsumexp. To 2
    // ulp will do where the result is rounded to 16 bits.
    template <bool TO_2_ULP = false>
    __device__ Sum finish(int i, int half, Sum sink, Sum gain, Sum& lse) {
        const Sum old = m[i][half], maximum = fmax(old, sink), shift = shift_of(maximum);
        const Sum rescale = exp2_of(old - shift);
        const Sum total = l[i][half] * rescale + exp2_of(sink - shift);
        lse = (maximum + log2_of(total)) * LN_2;
        if constexpr (TO_2_ULP)
            return total == 0 ? Sum(0) : __fdividef(gain, total) * rescale;
        return total == 0 ? Sum(0) : gain / total * rescale;
    }
};
