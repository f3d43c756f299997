// Layer 3. Online softmax of the rows of a warp, updated tile by tile, as in softmax.py. All exponentials
// have base 2. Milakov and Gimelshein, arXiv:1805.02867.
//
// exp2(fma(score, softmax_scale_log2, -shift)) is one FFMA and one MUFU, and rounds alike for all scores of
// a row. If the row maximum is large, that fma loses the low bits of the score, or overflows. So LARGE rows
// (|maximum| > LARGE_ROW_MAX in units of log 2) subtract the maximum from the scores first, which is exact
// where it matters, and then use a shift of 0. With a bias or a score_mod, which may add values such as
// -1e9 for masked-out keys, generic kernels treat all rows as large. Hopper's kernels find large rows in
// further passes.
#pragma once

#include "config.cuh"

// All-reduce over the four lanes of each row.
template <int MT, class Combine>
__device__ inline void reduce_lanes(Accum (&x)[MT][2], Combine combine) {
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int step = 1; step < 4; step *= 2)
                x[i][half] = combine(x[i][half], __shfl_xor_sync(~0u, x[i][half], step));
}

// Reductions of a warp that has all columns of its rows.
struct LoneWarp {
    template <int MT, class Combine>
    __device__ void all_reduce(Accum (&x)[MT][2], Combine combine) const {
        reduce_lanes(x, combine);
    }
};

// Reductions of the warps that share rows, each with some of the columns. They use a named barrier.
struct RowGroup {
    int warp_m, warp_n, row0;  // this warp's place among the warps, and its first row

    __device__ explicit RowGroup(int rows)
        : warp_m(threadIdx.x / WARP / WARPS_N),
          warp_n(threadIdx.x / WARP % WARPS_N),
          row0(warp_m * rows) {}

    __device__ void sync() const {
        asm volatile("bar.sync %0, %1;" ::"r"(barrier_id(NamedBarrier::ROW_GROUP, warp_m)),
                     "n"(WARP * WARPS_N)
                     : "memory");
    }

    // One array for all reductions. In all_reduce each instance of the template would have its own.
    __device__ static auto& parts() {
        __shared__ Accum parts[WARPS_N][WARPS_N > 1 ? BLOCK_Q : 1];
        return parts;
    }

    // All-reduce over the four lanes of each row, then over the warps. The caller synchronises all threads
    // between two calls.
    template <int MT, class Combine>
    __device__ void all_reduce(Accum (&x)[MT][2], Combine combine) const {
        reduce_lanes(x, combine);
        if constexpr (WARPS_N == 1) return;
        const Lane lane;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (lane.t == 0) parts()[warp_n][row0 + 16 * i + lane.row(2 * half)] = x[i][half];
        sync();
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row0 + 16 * i + lane.row(2 * half);
                x[i][half] = parts()[0][row];
#pragma unroll
                for (int n = 1; n < WARPS_N; ++n) x[i][half] = combine(x[i][half], parts()[n][row]);
            }
    }
};

// A row is large if the absolute value of its maximum exceeds this, in units of log 2. The rounding of a
// smaller shift changes P by no more than the rounding of P to 16 bits.
constexpr Accum LARGE_ROW_MAX = Accum(1 << 12);

// The shift for a running maximum: 0 for a row that has attended to nothing yet, since -inf - -inf is NaN.
// For the same reason a maximum of +infinity is stored as the largest finite number.
__device__ inline Accum shift_of(Accum m) { return m == -infinity<Accum>() ? Accum(0) : m; }

// Which rows are treated as large. BOUNDED: none. DETECT: rows with |maximum of a tile| > LARGE_ROW_MAX,
// from that tile on. DETECT_LATE: rows with a running maximum above LARGE_ROW_MAX; one far below zero may
// still rise. MAX_FIRST: all.
enum class RowMaxMode { BOUNDED, DETECT, DETECT_LATE, MAX_FIRST };

// The exponent of 2. An explicit fma, so that all kernels compute the same bits.
__device__ inline Accum exponent(Accum s, Accum softmax_scale_log2, Accum shift) {
    return fma(s, softmax_scale_log2, -shift);
}

// The new running maximum: the old one, unless the candidate exceeds it by more than RESCALE_THRESHOLD, in
// units of log 2. Maxima have these units after multiplication by softmax_scale_log2.
template <int RESCALE_THRESHOLD>
__device__ inline Accum running_max(Accum m, Accum candidate, Accum softmax_scale_log2 = 1) {
    return RESCALE_THRESHOLD == 0                                     ? fmax(m, candidate)
           : (candidate - m) * softmax_scale_log2 > RESCALE_THRESHOLD ? candidate
                                                                      : m;
}

// The shift that gives P its power of two (config.cuh), in units of log 2. If float32 is split, a product does.
__device__ inline Accum exponent_shift(Accum m) {
    return FORWARD_P_LOG2 == 0 || SPLIT_FLOATS ? m : m - Accum(FORWARD_P_LOG2);
}

// A lane's sum of exponentials up to this does not raise the shift.
template <int RESCALE_THRESHOLD>
constexpr Accum MAX_SUM = Accum(1 << (RESCALE_THRESHOLD + FORWARD_P_LOG2));

// The shift of a row after a tile. `most` is the largest sum of exponentials of a lane, with the old shift;
// the shift rises by the binary exponent of that sum. If the sum is huge or not finite, a factor for it
// would underflow (2**-126), and only the scores tell the right shift: return the largest number as a mark.
template <int RESCALE_THRESHOLD>
__device__ inline Accum raised(Accum shift, Accum most) {
    if (most <= MAX_SUM<RESCALE_THRESHOLD>) return shift;
    const int exponent = int(__float_as_uint(float(most)) >> 23) - 127;
    return exponent < 120 ? shift + Accum(exponent - FORWARD_P_LOG2) : largest<Accum>();
}

// By how much a sink exceeds a maximum `m`, which is in units of scores. The result is in units of log 2,
// and finite if the sink is.
__device__ inline Accum sink_above(Accum sink, Accum m, Accum softmax_scale) {
    const Accum above = rounded_product(fma(-m, softmax_scale, sink), LOG2_E);
    return is_finite(sink) ? clip_finite(above) : above;
}

// The softmax denominator of a row with a sink. The sink exceeds the shift of the sum l by `shifted` units
// of log 2. If l is 0 the row attends to nothing, and only the sink counts. Every fma is explicit, so that
// the passes of a kernel compute the same bits.
struct Denominator {
    Accum sink, above, rescale, total;

    __device__ Denominator(Accum l, Accum sink, Accum shifted)
        : sink(sink),
          above(l == 0 && sink > -infinity<Accum>() ? infinity<Accum>() : shifted),
          rescale(above > 0 ? exp2_of(-above) : Accum(1)),
          total(fma(l, rescale, above > 0 ? Accum(1) : exp2_of(above))) {}

    // log2 of the denominator, minus the shift. The denominator itself may overflow with a large sink.
    __device__ Accum log2() const { return fmax(above, Accum(0)) + log2_of(total); }

    // The logsumexp; shift and sink are natural logarithms.
    __device__ Accum lse(Accum shift) const {
        return fma(log2_of(total), LN_2, above > 0 ? sink : shift);
    }
};

// The softmax state of 16 * MT rows.
template <int MT>
struct RowState {
    // The running maximum, or up to RESCALE_THRESHOLD less. In units of log 2; in large rows, of scores.
    Accum m[MT][2];
    Accum l[MT][2];  // this lane's part of the sum of exp2(score - m + FORWARD_P_LOG2)
    u32 max_first;   // a bit for each row: it is large

    __device__ explicit RowState(bool all_max_first = ALL_ROWS_MAX_FIRST) : max_first(all_max_first ? ~0u : 0) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) m[i][half] = -infinity<Accum>(), l[i][half] = 0;
    }

    __device__ bool needs_max_first(int i, int half) const {
        return ALL_ROWS_MAX_FIRST || (max_first >> (2 * i + half) & 1);
    }

    // Replace the scores of a row by P, and return this lane's part of the sum.
    template <int NT>
    __device__ static Accum exponentiate(Fragment<Accum, MT, NT>& s, int i, int half,
                                         Accum softmax_scale_log2, Accum shift) {
        Accum total = 0;
        shift = exponent_shift(shift);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
                s.x[i][n][e] = exp2_of(exponent(s.x[i][n][e], softmax_scale_log2, shift));
                if constexpr (SPLIT_FLOATS) s.x[i][n][e] *= 1 / FORWARD_P_UNIT;  // exact, unlike a larger shift
                total += s.x[i][n][e];
            }
        return total;
    }

    // The maximum of each row of a tile. With PARTS > 1 there are several dependency chains.
    template <int PARTS, int NT, class Group>
    __device__ static void row_maxima(const Fragment<Accum, MT, NT>& s, const Group& group,
                                      Accum (&largest)[MT][2]) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Accum part[PARTS];
#pragma unroll
                for (int n = 0; n < PARTS; ++n) part[n] = s.x[i][n][2 * half];
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e)
                        part[n % PARTS] = fmax(part[n % PARTS], s.x[i][n][e]);
                largest[i][half] = part[0];
#pragma unroll
                for (int n = 1; n < PARTS; ++n) largest[i][half] = fmax(largest[i][half], part[n]);
            }
        group.all_reduce(largest, [](Accum x, Accum y) { return fmax(x, y); });
    }

    // Online softmax of a tile that skips the row maximum, for bounded rows. The shift of a row starts as
    // the maximum of the first tile to which it attends, and then follows the sums, which are needed
    // anyway. Returns true if a shift must rise: call `raise_shifts` then, otherwise `add_sums`.
    template <int RESCALE_THRESHOLD, int NT, class Group>
    __device__ bool update_by_sums(Fragment<Accum, MT, NT>& s, Accum softmax_scale_log2,
                                   const Group& group, Accum (&sums)[MT][2]) {
        bool begun = true, below = true;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) begun = begun && m[i][half] != -infinity<Accum>();
        if (!__all_sync(~0u, begun)) {
            Accum maxima[MT][2];
            row_maxima<NT < 4 ? NT : 4>(s, group, maxima);
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    if (m[i][half] == -infinity<Accum>())
                        m[i][half] = fmin(product_up(maxima[i][half], softmax_scale_log2),
                                          ::largest<Accum>());
        }
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                sums[i][half] =
                    exponentiate(s, i, half, softmax_scale_log2, shift_of(m[i][half]));
                below = below && sums[i][half] <= MAX_SUM<RESCALE_THRESHOLD>;
            }
        return !__all_sync(~0u, below);
    }
    __device__ void add_sums(const Accum (&sums)[MT][2]) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) l[i][half] += sums[i][half];
    }
    // Raise the shifts, rescale P, and return the factors for O. Rows with huge sums get the largest number
    // as their shift, for which `all_bounded` is false.
    template <int RESCALE_THRESHOLD, int NT, class Group>
    __device__ void raise_shifts(Fragment<Accum, MT, NT>& p, const Group& group,
                                 Accum (&sums)[MT][2], Accum (&rescale)[MT][2]) {
        Accum most[MT][2];
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) most[i][half] = sums[i][half];
        group.all_reduce(most, [](Accum x, Accum y) { return fmax(x, y); });
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Accum old = m[i][half];
                m[i][half] = raised<RESCALE_THRESHOLD>(old, most[i][half]);
                rescale[i][half] = exp2_of(old - shift_of(m[i][half]));
                l[i][half] = fma(l[i][half], rescale[i][half], sums[i][half] * rescale[i][half]);
            }
        p.scale_rows(rescale);
    }

    // Online softmax of a tile: replace the scores, before softmax_scale_log2, by unnormalised P, and
    // return the factors for O. A shift rises only if the maximum exceeds it by more than
    // RESCALE_THRESHOLD. With SHIFT_FROM_SUMS, bounded rows get the bits of `update_by_sums`.
    //
    // The shift is rounded up, so that exp2(score - shift) <= 1 even if the shift is too coarse for the
    // row: a large row that is not yet recognised. Its P may be too small but never infinite, and rescaling
    // erases it once the row is treated as large.
    template <int RESCALE_THRESHOLD = 0,
              RowMaxMode MODE = ALL_ROWS_MAX_FIRST ? RowMaxMode::MAX_FIRST : RowMaxMode::DETECT,
              bool SHIFT_FROM_SUMS = false, int NT, class Group>
    __device__ void update(Fragment<Accum, MT, NT>& s, Accum softmax_scale_log2, const Group& group,
                           Accum (&rescale)[MT][2]) {
        Accum largest[MT][2], begin[MT][2], most[MT][2], shift[MT][2], factor[MT][2];
        row_maxima<RESCALE_THRESHOLD == 0 ? 1 : NT < 4 ? NT : 4>(s, group, largest);
        if constexpr (SHIFT_FROM_SUMS) {
            // The shift of a row starts as the maximum of its first tile. The sums of the same tile may
            // raise it at once.
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    begin[i][half] = m[i][half] != -infinity<Accum>()
                                         ? m[i][half]
                                         : fmin(product_up(largest[i][half], softmax_scale_log2),
                                                ::largest<Accum>());
                    Fragment<Accum, MT, NT> copy = s;
                    most[i][half] = exponentiate(copy, i, half, softmax_scale_log2,
                                                 shift_of(begin[i][half]));
                }
            group.all_reduce(most, [](Accum x, Accum y) { return fmax(x, y); });
        }
        Accum old[MT][2], farthest = 0;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                old[i][half] = m[i][half];
                if constexpr (MODE == RowMaxMode::MAX_FIRST) continue;
                Accum candidate = product_up(largest[i][half], softmax_scale_log2);
                // A product that overflows to -infinity is a score, not a masked-out pair.
                if (HAS_ANY_SCORES && largest[i][half] != -infinity<Accum>())
                    candidate = fmax(candidate, -::largest<Accum>());
                m[i][half] =
                    fmin(running_max<RESCALE_THRESHOLD>(m[i][half], candidate), ::largest<Accum>());
                bool by_sum = false;
                if constexpr (SHIFT_FROM_SUMS) {
                    const Accum to = raised<RESCALE_THRESHOLD>(begin[i][half], most[i][half]);
                    by_sum = begin[i][half] != -infinity<Accum>() && to != ::largest<Accum>();
                    if (by_sum) m[i][half] = to;
                }
                shift[i][half] = shift_of(m[i][half]);
                rescale[i][half] = exp2_of(old[i][half] - shift[i][half]);
                factor[i][half] = by_sum ? exp2_of(begin[i][half] - shift[i][half]) : Accum(1);
                if (by_sum) shift[i][half] = begin[i][half];
                if constexpr (MODE == RowMaxMode::DETECT)
                    farthest = fmax(farthest, fabs(candidate));
                if constexpr (MODE == RowMaxMode::DETECT_LATE)
                    farthest = fmax(farthest, m[i][half]);
            }
        // Recompute the state of a large row. If it `was` not large before this tile, its old sum has the
        // old shift, in units of log 2.
        auto subtract_max = [&](int i, int half, bool was) {
            const Accum from =
                was ? old[i][half] : quotient_to_2_ulp(old[i][half], softmax_scale_log2);
            const Accum maximum = clip_finite(
                running_max<RESCALE_THRESHOLD>(from, largest[i][half], softmax_scale_log2));
            m[i][half] = maximum;
            shift[i][half] = 0, factor[i][half] = 1;
            rescale[i][half] = exp2_of(was ? difference(from, maximum) * softmax_scale_log2
                                           : fma(-maximum, softmax_scale_log2, old[i][half]));
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e)
                    s.x[i][n][e] = difference(s.x[i][n][e], maximum);
        };
        if (MODE != RowMaxMode::BOUNDED &&
            (MODE == RowMaxMode::MAX_FIRST || __any_sync(~0u, farthest > LARGE_ROW_MAX || max_first))) {
            // m of a row that was not large is already updated, as if it stayed bounded.
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool was = MODE == RowMaxMode::MAX_FIRST || needs_max_first(i, half);
                    const bool attends = largest[i][half] != -infinity<Accum>();
                    if (was || (MODE == RowMaxMode::DETECT_LATE
                                    ? m[i][half] > LARGE_ROW_MAX
                                    : attends && fabs(largest[i][half] * softmax_scale_log2) >
                                                     LARGE_ROW_MAX)) {
                        subtract_max(i, half, was);
                        max_first |= 1u << (2 * i + half);
                    }
                }
        }
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Accum total = exponentiate(s, i, half, softmax_scale_log2, shift[i][half]);
                if constexpr (SHIFT_FROM_SUMS) total *= factor[i][half];
                l[i][half] = fma(l[i][half], rescale[i][half], total);
            }
        if constexpr (SHIFT_FROM_SUMS) s.scale_rows(factor);
    }

    // True if no row that is treated as bounded is large. Marked shifts of `raised` count as large.
    __device__ bool all_bounded() const {
        bool bounded = true;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                bounded = bounded &&
                          !(fabs(m[i][half]) > LARGE_ROW_MAX && m[i][half] != -infinity<Accum>());
        return bounded;
    }

    // A bit for each row that attends to something and has a maximum, times softmax_scale_log2, below a
    // limit.
    __device__ u32 below(Accum limit, Accum softmax_scale_log2 = 1) const {
        u32 found = 0;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (m[i][half] != -infinity<Accum>() && m[i][half] * softmax_scale_log2 < limit)
                    found |= 1u << (2 * i + half);
        return found;
    }

    // Add up the sums of all lanes of a row, before `finalize`.
    template <class Group>
    __device__ void reduce_sums(const Group& group) {
        group.all_reduce(l, [](Accum x, Accum y) { return x + y; });
    }

    // One of a lane's two rows, with its whole sum. With REDUCE the lanes' sums are added; otherwise each lane has
    // the whole sum. Neighbouring lanes ask for different rows.
    template <bool REDUCE = true>
    __device__ RowState own_row(bool second) const {
        static_assert(MT == 1);
        RowState own = *this;
        const Accum other = second ? l[0][0] : l[0][1];
        Accum& sum = own.l[0][0];
        sum = second ? l[0][1] : l[0][0];
        if constexpr (REDUCE) {
            sum += __shfl_xor_sync(~0u, other, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
        }
        if (second) own.m[0][0] = m[0][1], own.max_first >>= 1;
        return own;
    }

    // Return the factor that normalises O, with the dropout scale, and the logsumexp. The sink is part of
    // the denominator. A quotient within 2 ulp is enough if O is rounded to 16 bits.
    template <bool TO_2_ULP = false>
    __device__ Accum finalize(int i, int half, Accum sink, Accum dropout_scale, Accum softmax_scale,
                              Accum& lse) {
        const Accum shift = clip_finite(m[i][half]);
        const bool in_scores = needs_max_first(i, half);
        // A sum is at least 1, up to the rounding of the exponents, which the power of two of P makes
        // coarser. Without this, the logsumexp of a single key with a score near 0 would show that
        // rounding.
        Accum sum = l[i][half] * FORWARD_P_UNIT;
        if (FORWARD_P_LOG2 > 0 && sum > 0 && sum < 1) sum = 1;
        const Denominator all(
            sum, sink, in_scores ? sink_above(sink, shift, softmax_scale) : fma(sink, LOG2_E, -shift));
        lse = all.lse(shift * (in_scores ? softmax_scale : LN_2));
        const Accum scale = dropout_scale * FORWARD_P_UNIT;
        const Accum quotient =
            TO_2_ULP ? quotient_to_2_ulp(scale, all.total) : scale / all.total;
        // If a row has a score of infinity, all its outputs are NaN, also with dropout: total - total is
        // NaN then, and 0 otherwise. There is no branch, so other work overlaps with the division.
        const Accum weight = fma(quotient, all.rescale, difference(all.total, all.total));
        return all.total == 0 ? Accum(0) : weight;
    }
};
