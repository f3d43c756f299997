// Layer 3. Online softmax: the state of some rows, updated tile by tile, as in softmax.py.
// Exponents are of base 2. Milakov and Gimelshein, arXiv:1805.02867.
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

// A warp that has all columns of its rows.
struct LoneWarp {
    template <int MT, class Combine>
    __device__ void all_reduce(Accum (&x)[MT][2], Combine combine) const {
        reduce_lanes(x, combine);
    }
};

// The warps that share rows, each with some of the columns. They have a named barrier of their own.
struct RowGroup {
    int warp_m, warp_n, row0;  // this warp among rows and columns of warps, and its first row

    __device__ explicit RowGroup(int rows)
        : warp_m(threadIdx.x / WARP / WARPS_N),
          warp_n(threadIdx.x / WARP % WARPS_N),
          row0(warp_m * rows) {}

    __device__ void sync() const {
        asm volatile("bar.sync %0, %1;" ::"r"(barrier_id(NamedBarrier::ROW_GROUP, warp_m)),
                     "n"(WARP * WARPS_N)
                     : "memory");
    }

    // One array for all reductions: each instance of a template would have its own.
    __device__ static auto& parts() {
        __shared__ Accum parts[WARPS_N][WARPS_N > 1 ? BLOCK_Q : 1];
        return parts;
    }

    // All-reduce over the four lanes of each row, then over the warps. All threads meet between two
    // calls.
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

// Rows whose maximum is beyond this, in units of log 2, are large. The rounding of a smaller shift
// changes P by no more than that to 16 bits.
constexpr Accum LARGE_ROW_MAX = Accum(1 << 12);

// Infinity cannot be subtracted from itself: rows that have attended to nothing are shifted by 0,
// and a maximum of infinity counts as the largest number.
__device__ inline Accum shift_of(Accum m) { return m == -infinity<Accum>() ? Accum(0) : m; }

// Which rows are taken as large, as told at `RowState`. BOUNDED: none. DETECT: a row from its first
// tile on whose maximum is beyond LARGE_ROW_MAX, with either sign. DETECT_LATE: a row once its
// running maximum is above LARGE_ROW_MAX; one far below zero may still rise. LARGE_SCORES: all.
enum class RowMaxMode { BOUNDED, DETECT, DETECT_LATE, MAX_FIRST };

// The exponent of 2 in all kernels: spelled out as an fma, so that all have the same bits.
__device__ inline Accum exponent(Accum s, Accum softmax_scale_log2, Accum shift) {
    return fma(s, softmax_scale_log2, -shift);
}

// The new running maximum. RESCALE_THRESHOLD is in units of log 2, as maxima times
// softmax_scale_log2 are.
template <int RESCALE_THRESHOLD>
__device__ inline Accum running_max(Accum m, Accum candidate, Accum softmax_scale_log2 = 1) {
    return RESCALE_THRESHOLD == 0                                     ? fmax(m, candidate)
           : (candidate - m) * softmax_scale_log2 > RESCALE_THRESHOLD ? candidate
                                                                      : m;
}

// The shift of exponents for a row with a maximum, both in units of log 2: P has a power of two.
__device__ inline Accum exponent_shift(Accum m) {
    return FORWARD_P_LOG2 == 0 ? m : m - Accum(FORWARD_P_LOG2);
}

// The largest sum of exponentials of a lane that leaves a shift as it is.
template <int RESCALE_THRESHOLD>
constexpr Accum MAX_SUM = Accum(1 << (RESCALE_THRESHOLD + FORWARD_P_LOG2));

// The shift of a row behind a tile, one of whose lanes has `most` as its sum of exponentials with
// the shift before: it rises by the exponent of the sum. Where that is huge, or not finite, only
// scores can tell by how much; a factor below 2**-126 would be lost.
template <int RESCALE_THRESHOLD>
__device__ inline Accum raised(Accum shift, Accum most) {
    if (most <= MAX_SUM<RESCALE_THRESHOLD>) return shift;
    const int exponent = int(__float_as_uint(float(most)) >> 23) - 127;
    return exponent < 120 ? shift + Accum(exponent - FORWARD_P_LOG2) : largest<Accum>();
}

// By how much a sink exceeds a score, held as `m`, in units of log 2: finite where the sink is.
__device__ inline Accum sink_above(Accum sink, Accum m, Accum softmax_scale) {
    const Accum above = rounded_product(fma(-m, softmax_scale, sink), LOG2_E);
    return is_finite(sink) ? clip_finite(above) : above;
}

// The softmax denominator with a sink. `shifted` is by how many units of log 2 the sink exceeds the
// shift of the sum l. Where l is 0, nothing was attended to, and nothing was shifted. Every fma is
// spelled out: the passes of one kernel have the same bits.
struct Denominator {
    Accum sink, above, rescale, total;

    __device__ Denominator(Accum l, Accum sink, Accum shifted)
        : sink(sink),
          above(l == 0 && sink > -infinity<Accum>() ? infinity<Accum>() : shifted),
          rescale(above > 0 ? exp2_of(-above) : Accum(1)),
          total(fma(l, rescale, above > 0 ? Accum(1) : exp2_of(above))) {}

    // Its logarithm of base 2, less the shift. The sum itself may overflow with a large sink.
    __device__ Accum log2() const { return fmax(above, Accum(0)) + log2_of(total); }

    // shift and sink are in natural units.
    __device__ Accum lse(Accum shift) const {
        return fma(log2_of(total), LN_2, above > 0 ? sink : shift);
    }
};

// An exponent is fma(score, softmax_scale_log2, -shift): one instruction, with the same rounding of
// the shift in all of a row. Where shifts are large this is too coarse, or overflows. So large rows
// subtract the maximum from their scores first, which is exact where it matters, and have no shift.
// A bias makes scores of any size, as -1e9 or the lowest number stand for what is masked out: with
// a bias all rows are large, and with a function of the caller's own, but for Hopper's kernels.
template <int MT>
struct RowState {
    // Running maximum, or less by up to the threshold: in units of log 2, or of scores in large
    // rows.
    Accum m[MT][2];
    Accum l[MT][2];  // this lane's share of the sum of exp2(score - m + FORWARD_P_LOG2)
    u32 max_first;       // a bit for each row

    // Where all rows are large from the beginning, maxima are exact at a threshold of 0.
    __device__ explicit RowState(bool all_max_first = ALL_ROWS_MAX_FIRST) : max_first(all_max_first ? ~0u : 0) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) m[i][half] = -infinity<Accum>(), l[i][half] = 0;
    }

    __device__ bool needs_max_first(int i, int half) const {
        return ALL_ROWS_MAX_FIRST || (max_first >> (2 * i + half) & 1);
    }

    // Turn the scores of a row into exponentials, with the power of two of P, and return this lane's
    // share of their sum.
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
                total += s.x[i][n][e];
            }
        return total;
    }

    // The maximum of each row. Several partial maxima: one alone would be a long dependency chain.
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

    // Online softmax of a tile without maxima in most tiles, where no row is taken as large: the
    // shift of a row is the maximum of the first tile to which it attends, and from then on follows
    // sums, which are needed anyway. Returns whether one is to rise: then `raise_shifts` comes next,
    // else `add_sums`.
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
            row_maxima<4>(s, group, maxima);
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
    // Rescale P, too, and return by what. Rows whose sums are huge get a shift that `all_bounded`
    // refuses.
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

    // Online softmax of a tile: turn scores, as yet without softmax_scale_log2, into unnormalised
    // P, and return by what O and the sums so far are rescaled. A maximum that exceeds the shift by
    // no more than RESCALE_THRESHOLD leaves it as it is. BY_SUMS: rows that are not large have the
    // bits of `update_by_sums`.
    //
    // Maxima are rounded up: P of rows wrongly not taken as large is too small, never infinite, and
    // goes away when the maximum rises.
    template <int RESCALE_THRESHOLD = 0,
              RowMaxMode MODE = ALL_ROWS_MAX_FIRST ? RowMaxMode::MAX_FIRST : RowMaxMode::DETECT,
              bool SHIFT_FROM_SUMS = false, int NT, class Group>
    __device__ void update(Fragment<Accum, MT, NT>& s, Accum softmax_scale_log2, const Group& group,
                           Accum (&rescale)[MT][2]) {
        Accum largest[MT][2], begin[MT][2], most[MT][2], shift[MT][2], factor[MT][2];
        row_maxima<RESCALE_THRESHOLD == 0 ? 1 : 4>(s, group, largest);
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
                // The lowest numbers are scores, too.
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
        // Large rows start over. What was summed before a row became large is shifted by its old
        // maximum.
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
            // By now m of a row that was not large is updated as of one that stays so.
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

    // Whether no row is large, of those that are not taken as large.
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

    // A bit for each row that attends to something and whose maximum, times softmax_scale_log2, is
    // below a limit.
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

    // Reduce the sums over all lanes of a row, before `finalize`.
    template <class Group>
    __device__ void reduce_sums(const Group& group) {
        group.all_reduce(l, [](Accum x, Accum y) { return x + y; });
    }

    // The first of a lane's two rows, or the second, with its whole sum. Neighbouring lanes ask for
    // different ones.
    __device__ RowState own_row(bool second) const {
        static_assert(MT == 1);
        RowState own = *this;
        const Accum other = second ? l[0][0] : l[0][1];
        Accum& sum = own.l[0][0];
        sum = second ? l[0][1] : l[0][0], sum += __shfl_xor_sync(~0u, other, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (second) own.m[0][0] = m[0][1], own.max_first >>= 1;
        return own;
    }

    // With the sink in the denominator: the factor that normalises O, dropout scale included, and
    // the logsumexp. Scores lack softmax_scale as yet. 2 ulp are enough where O is rounded to 16
    // bits.
    template <bool TO_2_ULP = false>
    __device__ Accum finalize(int i, int half, Accum sink, Accum dropout_scale, Accum softmax_scale,
                              Accum& lse) {
        const Accum shift = clip_finite(m[i][half]);
        const bool in_scores = needs_max_first(i, half);
        // A sum is 1 at least, but for the rounding of exponents, which is coarser with the power of
        // two of P: in the logsumexp of one key near 0 it would show.
        Accum sum = l[i][half] * FORWARD_P_UNIT;
        if (FORWARD_P_LOG2 > 0 && sum > 0 && sum < 1) sum = 1;
        const Denominator all(
            sum, sink, in_scores ? sink_above(sink, shift, softmax_scale) : fma(sink, LOG2_E, -shift));
        lse = all.lse(shift * (in_scores ? softmax_scale : LN_2));
        const Accum scale = dropout_scale * FORWARD_P_UNIT;
        const Accum quotient =
            TO_2_ULP ? quotient_to_2_ulp(scale, all.total) : scale / all.total;
        // In a row with a score of infinity what is dropped is NaN, too. Without a branch: what
        // does not depend on the quotient goes on beside it.
        const Accum weight = fma(quotient, all.rescale, difference(all.total, all.total));
        return all.total == 0 ? Accum(0) : weight;
    }
};
