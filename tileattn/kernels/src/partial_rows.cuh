// Layer 3. Rows of results over some of the keys, joined with those over others: `RowState.merge` of
// states whose denominators are 1.
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
