// Layer 3. What belongs to one head; and the textbook formula for one row at a time, by one warp,
// for head dimensions that no tiled kernel has room for. What is masked out is not multiplied by
// zero but left out.
#pragma once

#include "mask.cuh"
#include "softmax.cuh"

__device__ inline Sum warp_sum(Sum x) {
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
__device__ inline Sum warp_maximum(Sum x) {
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) x = fmax(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

template <class T>
__device__ inline const T* rows_of(const void* data, const Rows& at, i64 b, i64 h) {
    return static_cast<const T*>(data) + b * at.b + h * at.h;
}
template <class T>
__device__ inline T* rows_of(void* data, const Rows& at, i64 b, i64 h) {
    return static_cast<T*>(data) + b * at.b + h * at.h;
}

__device__ inline Sum sink_of(const Params& p, i64 h) {
    return p.sinks ? static_cast<const Sum*>(p.sinks)[h] : -infinity<Sum>();
}

// What is special about a key head of one batch entry, as the backward pass finds out: something is
// not finite, or scores are so large that the logsumexp does not tell probabilities exactly. Hopper's
// kernels skip heads that are known to be special; one that they find special they leave to others.
// Twins of these marks are in steps.py.
constexpr u32 NON_FINITE = 1, LARGE = 2, KNOWN = NON_FINITE | LARGE, FAILED = 4;
__device__ inline u32& special(const Params& p, i64 b, i64 kv) {
    return p.special[b * p.Hkv + kv];
}

// Whether some head has one of the marks that this kernel repairs; mostly none has. All threads call.
__device__ inline bool any_to_repair(const Params& p) {
    bool any = false;
    for (i64 i = threadIdx.x; i < p.B * p.Hkv; i += blockDim.x)
        any = any || p.special[i] & REPAIRS;
    return __syncthreads_or(any);
}

// Work on all blocks: each block of threads on one, or to repair, few of them on many.
template <class Work>
__device__ inline void for_blocks(const Params& p, i64 blocks, Work work) {
    if constexpr (!REPAIRS) {
        work(int(blockIdx.x));
    } else {
        if (!any_to_repair(p)) return;
#pragma unroll 1
        for (i64 i = blockIdx.x; i < blocks; i += gridDim.x) {
            work(int(i));
            __syncthreads();  // everybody is done with shared memory
        }
    }
}

// One query head of one batch entry.
struct Head {
    const Params& p;
    i64 b, h;
    const Element *q, *k, *v, *dout;
    Sight sight;
    Terms terms;
    Dropout dropout;

    __device__ Head(const Params& p, i64 b, i64 h)
        : p(p),
          b(b),
          h(h),
          q(rows_of<Element>(p.q, p.q_at, b, h)),
          k(rows_of<Element>(p.k, p.k_at, b, int(h) / int(p.group))),
          v(rows_of<Element>(p.v, p.v_at, b, int(h) / int(p.group))),
          dout(rows_of<Element>(p.dout, p.dout_at, b, h)),
          sight(p, b, h),
          terms(p, b, h),
          dropout(p, b, h) {
        // Four registers of addresses are cheaper than their products again for every tile.
        asm volatile("" : "+l"(q), "+l"(k), "+l"(v), "+l"(dout));
    }

    __device__ i64 row(int i) const { return (b * p.Hq + h) * p.Nq + i; }

    // What backward_rows has left of this head; of a LARGE one backward_renormalise has.
    __device__ Sum* numbers(void* of) const {
        return static_cast<Sum*>(of) + (b * p.Hq + h) * p.rows;
    }
    __device__ Sum* shift() const { return numbers(p.shift); }
    __device__ Sum* delta() const { return numbers(p.delta); }
    __device__ Sum* row_max() const { return numbers(p.row_max); }
    __device__ bool is_large() const { return special(p, b, int(h) / int(p.group)) & LARGE; }

    __device__ Sum sink() const { return sink_of(p, h); }

    // Score times terms.unit() is in units of log 2; -infinity where hidden.
    __device__ Sum score(int i, int j, Sum& derivative) const {
        derivative = 1;
        if (!sight.visible(i, j)) return -infinity<Sum>();
        Sum product = 0;
        for (int d = 0; d < p.D; ++d)
            product =
                fma(Sum(widen(q[i * p.q_at.n + d])), Sum(widen(k[j * p.k_at.n + d])), product);
        return terms.score(product, i, j, terms.bias_of(i, j), derivative);
    }
};

// What the backward pass knows of the pair (i, j).
struct PairGradient {
    bool seen;
    Sum p, ds, capped;  // dropped probability, gradient at the score, and at the scaled product
};

__device__ inline PairGradient pair_gradient(const Head& head, int i, int j) {
    const Params& p = head.p;
    Sum derivative;
    Sum s = head.score(i, j, derivative);
    if (s == -infinity<Sum>()) return {false, 0, 0, 0};
    if (head.is_large()) s = difference(s, head.row_max()[i]);
    const Sum probability = exp2_of(fma(s, head.terms.unit(), -head.shift()[i]));
    const Sum keep = HAS_DROPOUT ? (head.dropout.keeps(i, j) ? Sum(p.gain) : Sum(0)) : Sum(1);
    Sum dp = 0;
    for (int d = 0; d < p.Dv; ++d)
        dp = fma(Sum(widen(head.dout[i * p.dout_at.n + d])),
                 Sum(widen(head.v[j * p.v_at.n + d])), dp);
    const Sum ds = probability * (dp * keep - head.delta()[i]);
    return {true, probability * keep, ds, ds * derivative};
}

// Visit what a warp's 32 pairs hold, one pair after the other, in every lane.
template <class Row>
__device__ inline void in_turn(bool seen, Sum weight, Row add) {
    for (u32 left = __ballot_sync(~0u, seen); left; left &= left - 1) {
        const int other = __ffs(left) - 1;
        add(other, __shfl_sync(~0u, weight, other));
    }
}

// The maximum of the scores of query i, clipped to be finite, and the sum of exp2(score - maximum).
__device__ inline void sum_of_row(const Head& head, int i, Sum& m, Sum& l) {
    const int lane = threadIdx.x % WARP;
    const Range keys = head.sight.band.keys_of(i, i + 1);
    Sum derivative;
    m = -infinity<Sum>(), l = 0;
    for (int j = keys.lo + lane; j < keys.hi; j += WARP) m = fmax(m, head.score(i, j, derivative));
    m = clip_finite(warp_maximum(m));
    for (int j = keys.lo + lane; j < keys.hi; j += WARP)
        l += exp2_of(difference(head.score(i, j, derivative), m) * head.terms.unit());
    l = warp_sum(l);
}

// out and lse of query i. Columns come 32 at a time, the keys are gone through again for each.
__device__ inline void forward_row(const Params& p, i64 b, i64 h, int i) {
    const Head head(p, b, h);
    const Sum sink = head.sink();
    const int lane = threadIdx.x % WARP;
    const Range keys = head.sight.band.keys_of(i, i + 1);
    Sum derivative, m, l;
    sum_of_row(head, i, m, l);
    const Sum unit = head.terms.unit(), natural = Sum(p.natural);
    const Denominator all(l, sink, sink_above(sink, m, natural));
    if (lane == 0) static_cast<Sum*>(p.lse)[head.row(i)] = all.lse(m * natural);
    Element* out = rows_of<Element>(p.out, p.out_at, head.b, head.h) + i * p.out_at.n;
    for (int d0 = 0; d0 < p.Dv; d0 += WARP) {
        const int d = d0 + lane;
        Sum total = 0;
        for (int j0 = keys.lo; j0 < keys.hi; j0 += WARP) {
            const int j = j0 + lane;
            const Sum s = j < keys.hi ? head.score(i, j, derivative) : -infinity<Sum>();
            const bool kept = !HAS_DROPOUT || head.dropout.keeps(i, j);
            const Sum own = kept ? exp2_of(difference(s, m) * unit) : Sum(0);
            in_turn(s != -infinity<Sum>(), own, [&](int other, Sum weight) {
                const Element* const row = head.v + (j0 + other) * p.v_at.n;
                if (d < p.Dv) total = fma(weight, Sum(widen(row[d])), total);
            });
        }
        if (d < p.Dv)
            out[d] = narrow<Element>(
                all.total == 0 ? Sum(0) : total * (Sum(p.gain) / all.total * all.rescale));
    }
}

// dq of query i.
__device__ inline void query_row(const Params& p, i64 b, i64 h, int i) {
    const Head head(p, b, h);
    const int lane = threadIdx.x % WARP;
    const Range keys = head.sight.band.keys_of(i, i + 1);
    Element* dq = rows_of<Element>(p.dq, p.dq_at, head.b, head.h) + i * p.dq_at.n;
    for (int d0 = 0; d0 < p.D; d0 += WARP) {
        const int d = d0 + lane;
        Sum total = 0;
        for (int j0 = keys.lo; j0 < keys.hi; j0 += WARP) {
            const int j = j0 + lane;
            const PairGradient pair =
                j < keys.hi ? pair_gradient(head, i, j) : PairGradient{false, 0, 0, 0};
            in_turn(pair.seen, pair.capped, [&](int other, Sum weight) {
                if (d < p.D)
                    total = fma(weight, Sum(widen(head.k[(j0 + other) * p.k_at.n + d])), total);
            });
        }
        if (d < p.D) dq[d] = narrow<Element>(total * Sum(p.scale));
    }
}

// dk and dv of key j of key head `kv`.
__device__ inline void key_row(const Params& p, i64 b, i64 kv, int j) {
    const int lane = threadIdx.x % WARP, group = int(p.group);
    Element* dk = rows_of<Element>(p.dk, p.dk_at, b, kv) + j * p.dk_at.n;
    Element* dv = rows_of<Element>(p.dv, p.dv_at, b, kv) + j * p.dv_at.n;
    for (int d0 = 0; d0 < p.D || d0 < p.Dv; d0 += WARP) {
        const int d = d0 + lane;
        Sum dk_total = 0, dv_total = 0;
        for (int g = 0; g < group; ++g) {
            const Head head(p, b, kv * group + g);
            const Range queries = head.sight.band.queries_of(j, j + 1);
            for (int i0 = queries.lo; i0 < queries.hi; i0 += WARP) {
                const int i = i0 + lane;
                const PairGradient pair =
                    i < queries.hi ? pair_gradient(head, i, j) : PairGradient{false, 0, 0, 0};
                in_turn(pair.seen, pair.capped, [&](int other, Sum weight) {
                    if (d < p.D)
                        dk_total =
                            fma(weight, Sum(widen(head.q[(i0 + other) * p.q_at.n + d])), dk_total);
                });
                in_turn(pair.seen, pair.p, [&](int other, Sum weight) {
                    const Element* dout = head.dout + (i0 + other) * p.dout_at.n;
                    if (d < p.Dv) dv_total = fma(weight, Sum(widen(dout[d])), dv_total);
                });
            }
        }
        if (d < p.D) dk[d] = narrow<Element>(dk_total * Sum(p.scale));
        if (d < p.Dv) dv[d] = narrow<Element>(dv_total);
    }
}
