// Layer 3. Online softmax: the state of some rows, updated tile by tile, as in softmax.py.
// Exponents are of base 2. Milakov and Gimelshein, arXiv:1805.02867.
#pragma once

#include "config.cuh"

// The warps that share rows, each with some of the columns. They have a named barrier of their own.
struct RowGroup {
    int warp_m, warp_n, row0;  // this warp among rows and columns of warps, and its first row

    __device__ explicit RowGroup(int rows)
        : warp_m(threadIdx.x / WARP / WARPS_N),
          warp_n(threadIdx.x / WARP % WARPS_N),
          row0(warp_m * rows) {}

    __device__ void sync() const {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + warp_m), "n"(WARP * WARPS_N) : "memory");
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
        const Lane lane;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Accum& mine = x[i][half];
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
                for (int n = 1; n < WARPS_N; ++n) x[i][half] = combine(x[i][half], parts()[n][row]);
            }
    }
};

// Ordinary rows have shifts no larger than this, in units of log 2: their rounding changes P by no
// more than that to 16 bits.
constexpr Accum ORDINARY = Accum(1 << 12);

// Infinity cannot be subtracted from itself: rows that have attended to nothing are shifted by 0,
// and a maximum of infinity counts as the largest number.
__device__ inline Accum shift_of(Accum m) { return m == -infinity<Accum>() ? Accum(0) : m; }

// Which rows may be large, as told at `RowState`. ORDINARY and LARGE rows stay what they are.
// EITHER: a row turns large with the first tile whose maximum is beyond ORDINARY. RISING: a row
// turns large once its running maximum is above ORDINARY, and stays ordinary far below zero. The
// last maximum tells whether it has turned.
enum class RowKind { ORDINARY, EITHER, RISING, LARGE };

// The exponent of 2 in all kernels: spelled out as an fma, so that all have the same bits.
__device__ inline Accum exponent(Accum s, Accum unit, Accum shift) { return fma(s, unit, -shift); }

// The new running maximum. SLACK is in units of log 2, the maxima are in multiples of `unit` of
// these.
template <int SLACK>
__device__ inline Accum raised(Accum m, Accum candidate, Accum unit = 1) {
    return SLACK == 0 ? fmax(m, candidate) : (candidate - m) * unit > SLACK ? candidate : m;
}

// By how much a sink exceeds a score, held as `m`, in units of log 2: finite where the sink is.
__device__ inline Accum sink_above(Accum sink, Accum m, Accum natural) {
    const Accum above = rounded_product(fma(-m, natural, sink), LOG2_E);
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

// An exponent is fma(score, unit, -shift): one instruction, with the same rounding of the shift in
// all of a row. Where shifts are large this is too coarse, or overflows. So large rows subtract the
// maximum from their scores first, which is exact where it matters, and have no shift. A bias makes
// scores of any size, as -1e9 or the lowest number stand for what is masked out: with a bias all
// rows are large.
template <int MT>
struct RowState {
    Accum m[MT][2];  // running maximum, but for slack, in units of log 2; of large rows, of scores
    Accum l[MT][2];  // this lane's share of the sum of exp2(score - m)
    u32 large;       // a bit for each row

    // Where all rows are large from the beginning, maxima are exact without slack.
    __device__ explicit RowState(bool all_large = HAS_BIAS) : large(all_large ? ~0u : 0) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) m[i][half] = -infinity<Accum>(), l[i][half] = 0;
    }

    __device__ bool is_large(int i, int half) const {
        return HAS_BIAS || (large >> (2 * i + half) & 1);
    }

    // Online softmax of a tile: turn scores, in multiples of `unit`, into unnormalised P, and
    // return by what O and the sums so far are rescaled. A maximum that exceeds the shift by no
    // more than SLACK leaves it as it is.
    //
    // Maxima are rounded up: P of rows wrongly taken for ordinary is too small, never infinite, and
    // goes away when the maximum rises.
    template <int SLACK = 0, RowKind ROWS = HAS_BIAS ? RowKind::LARGE : RowKind::EITHER, int NT>
    __device__ void update(Fragment<Accum, MT, NT>& s, Accum unit, const RowGroup& group,
                           Accum (&rescale)[MT][2]) {
        Accum largest[MT][2], shift[MT][2];
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Several partial maxima: one alone would be a long dependency chain.
                constexpr int PARTS = SLACK == 0 ? 1 : 4;
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
        auto exponentiate = [&](int i, int half) {
            Accum total = 0;
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    s.x[i][n][e] = exp2_of(exponent(s.x[i][n][e], unit, shift[i][half]));
                    total += s.x[i][n][e];
                }
            l[i][half] = fma(l[i][half], rescale[i][half], total);
        };
        Accum old[MT][2], farthest = 0;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                old[i][half] = m[i][half];
                if constexpr (ROWS == RowKind::LARGE) continue;
                const Accum candidate = product_up(largest[i][half], unit);
                m[i][half] = fmin(raised<SLACK>(m[i][half], candidate), ::largest<Accum>());
                shift[i][half] = shift_of(m[i][half]);
                rescale[i][half] = exp2_of(old[i][half] - shift[i][half]);
                if constexpr (ROWS == RowKind::EITHER) farthest = fmax(farthest, fabs(candidate));
                if constexpr (ROWS == RowKind::RISING) farthest = fmax(farthest, m[i][half]);
                if constexpr (ROWS == RowKind::ORDINARY) exponentiate(i, half);
            }
        if constexpr (ROWS == RowKind::ORDINARY) return;
        // Large rows start over. What was summed before a row became large is shifted by its old
        // maximum.
        auto lower = [&](int i, int half, bool was) {
            const Accum from = was ? old[i][half] : quotient_to_2_ulp(old[i][half], unit);
            const Accum maximum = clip_finite(raised<SLACK>(from, largest[i][half], unit));
            m[i][half] = maximum;
            shift[i][half] = 0;
            rescale[i][half] =
                exp2_of(was ? difference(from, maximum) * unit : fma(-maximum, unit, old[i][half]));
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e)
                    s.x[i][n][e] = difference(s.x[i][n][e], maximum);
        };
        if (ROWS == RowKind::LARGE || __any_sync(~0u, farthest > ORDINARY || large)) {
            // By now m of a row that was not large is that of an ordinary one.
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool was = ROWS == RowKind::LARGE || is_large(i, half);
                    const bool attends = largest[i][half] != -infinity<Accum>();
                    if (was || (ROWS == RowKind::RISING
                                    ? m[i][half] > ORDINARY
                                    : attends && fabs(largest[i][half] * unit) > ORDINARY)) {
                        lower(i, half, was);
                        large |= 1u << (2 * i + half);
                    }
                }
        }
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) exponentiate(i, half);
    }

    // Whether rows that were taken for ordinary are.
    __device__ bool all_ordinary() const {
        bool ordinary = true;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                ordinary =
                    ordinary && !(fabs(m[i][half]) > ORDINARY && m[i][half] != -infinity<Accum>());
        return ordinary;
    }

    // A bit for each row that attends to something and whose maximum, in multiples of `unit`, is
    // below a limit.
    __device__ u32 below(Accum limit, Accum unit = 1) const {
        u32 found = 0;
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (m[i][half] != -infinity<Accum>() && m[i][half] * unit < limit)
                    found |= 1u << (2 * i + half);
        return found;
    }

    // Reduce the sums over all lanes of a row, before `finalize`.
    __device__ void reduce_sums(const RowGroup& group) {
        group.all_reduce(l, [](Accum x, Accum y) { return x + y; });
    }

    // With the sink in the denominator: the factor that normalises O, dropout scale included, and
    // the logsumexp. Scores are multiples of `natural`. 2 ulp are enough where O is rounded to 16
    // bits.
    template <bool TO_2_ULP = false>
    __device__ Accum finalize(int i, int half, Accum sink, Accum dropout_scale, Accum natural,
                              Accum& lse) {
        const Accum shift = clip_finite(m[i][half]);
        const bool in_scores = is_large(i, half);
        const Denominator all(
            l[i][half], sink,
            in_scores ? sink_above(sink, shift, natural) : fma(sink, LOG2_E, -shift));
        lse = all.lse(shift * (in_scores ? natural : LN_2));
        if (all.total == 0) return 0;
        // In a row with a score of infinity what is dropped is NaN, too.
        if (all.total == infinity<Accum>()) return infinity<Accum>() - infinity<Accum>();
        return (TO_2_ULP ? quotient_to_2_ulp(dropout_scale, all.total)
                         : dropout_scale / all.total) *
               all.rescale;
    }
};
