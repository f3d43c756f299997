// Layer 3. Results of rows over parts of the keys, merged: `RowState.merge` of states whose denominators
// are 1. Running sums in 32 bits can be stored in two 16-bit halves.
#pragma once

#include "config.cuh"

__device__ inline bool has_keys(Accum lse) { return !(lse < clip_finite(lse)); }

// The weights of two parts of a row, and the logsumexp of both. A part without keys has the logsumexp
// -infinity.
struct Joined {
    Accum first, second, lse;

    __device__ Joined(Accum a, Accum b) {
        const Accum m = a > b || a != a ? a : b, shift = clip_finite(m);
        const Accum exp_a = exp(a - shift), exp_b = exp(b - shift), l = exp_a + exp_b;
        const Accum weight = l == 0 ? Accum(0) : Accum(1) / l;
        first = exp_a * weight, second = exp_b * weight;
        lse = m + log(l);
    }
};

// An output times its weight. The output of a part without keys counts as 0, whatever is stored there.
__device__ inline Accum weighted(Accum weight, Accum x, Accum lse) {
    return has_keys(lse) ? weight * x : Accum(0);
}

// Indices of the rows of a part in the part itself, in the result, and in the array of lower halves. The
// heads of the part are `head_stride` rows apart. The result has `rows` rows for each head. The part has the
// rows from row0 on. Batch entries of the result are `entry_rows` rows apart.
struct PartRows {
    i64 heads, head_stride, rows, row0, entry_rows;

    __device__ i64 in_part(i64 head, i64 row) const { return head * head_stride + row; }
    __device__ i64 in_result(i64 head, i64 row) const {
        return head / heads * entry_rows + head % heads * rows + row0 + row;
    }
    __device__ i64 in_halves(i64 head, i64 row) const { return head * rows + row0 + row; }
};

constexpr int TOGETHER = 4;  // elements of a thread that are loaded before the first is stored

// Running sums in the accumulator type, stored in place of the result. If the result has 16 bits, it holds
// the upper half of a sum, and `low` the lower half. A sum that is not split is an ordinary element of the
// result.
template <class T>
struct Sums {
    T* result;
    unsigned short* low;

    __device__ Accum load(i64 i, i64 at, bool is_split) const {
        if constexpr (sizeof(T) == 2) {
            if (is_split) return __uint_as_float(u32(result[i].bits) << 16 | low[at]);
        }
        return widen(result[i]);
    }
    __device__ void store(i64 i, i64 at, Accum x, bool splits) const {
        if constexpr (sizeof(T) == 2) {
            if (splits) {
                const u32 bits = __float_as_uint(x);
                result[i].bits = bits >> 16, low[at] = bits & 0xffff;
                return;
            }
        }
        result[i] = narrow<T>(x);
    }
};
