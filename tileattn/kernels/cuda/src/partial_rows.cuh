// Layer 3. Rows of results over some of the keys, joined with those over others: `RowState.merge` of
// states whose denominators are 1. And sums of 32 bits in two halves.
#pragma once

#include "config.cuh"

__device__ inline bool has_keys(Accum lse) { return !(lse < clip_finite(lse)); }

// What both parts of a row weigh, and the logsumexp of the whole; -infinity is a part without keys.
struct Joined {
    Accum first, second, lse;

    __device__ Joined(Accum a, Accum b) {
        const Accum m = a > b || a != a ? a : b, shift = clip_finite(m);
        const Accum mine = exp(a - shift), theirs = exp(b - shift), l = mine + theirs;
        const Accum weight = l == 0 ? Accum(0) : Accum(1) / l;
        first = mine * weight, second = theirs * weight;
        lse = m + log(l);
    }
};

// A part without keys has no values, whatever stands there.
__device__ inline Accum weighted(Accum weight, Accum x, Accum lse) {
    return has_keys(lse) ? weight * x : Accum(0);
}

// Some rows of all heads of B entries: of a part, whose heads begin `apart` rows apart, and where
// these are in a result of `rows` for each head, whose entries begin `entry_rows` rows apart.
struct PartRows {
    i64 heads, apart, rows, row0, entry_rows;

    __device__ i64 in_part(i64 head, i64 row) const { return head * apart + row; }
    __device__ i64 in_result(i64 head, i64 row) const {
        return head / heads * entry_rows + head % heads * rows + row0 + row;
    }
    __device__ i64 in_halves(i64 head, i64 row) const { return head * rows + row0 + row; }
};

constexpr int TOGETHER = 4;  // elements of a thread that are loaded before the first is stored

// Sums in the accumulator type where the result will be. Of a result of 16 bits that has the upper
// half of a sum, and `low` has the lower one; a sum that is not split is a number of the result.
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
