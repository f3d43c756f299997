// Layer 3. The gradient of an array that score_mod reads, for one place where it reads it: dS times the
// derivative with respect to the element, summed in float64. Either no two CTAs add to the same elements,
// or each of `shares` CTAs sums into its own copy. The generated functions.cuh has the derivative with
// respect to the element in place of that with respect to the score.
#pragma once

#include "diagonals.cuh"
#include "element_sums.cuh"

// Shared memory after the tiles: diagonals, and then a window of sums for each thread.
constexpr int DIAGONALS_BYTES = LearnedElement::OF_DISTANCE ? Diagonals::BYTES : 0;
constexpr int window_of(int before) {
    return (SHARED_BYTES - before - DIAGONALS_BYTES) / (THREADS * int(sizeof(Accum)));
}

// The number of CTAs that sum into the same elements, and the index of this CTA among them.
__device__ inline int daux_shares(const Params& p) { return int(LearnedElement::sums(p).sizes[0]); }
__device__ inline int daux_share(const Params& p) { return int(blockIdx.x) % daux_shares(p); }

// The score tiles that belong to a CTA.
__device__ inline Steps daux_steps(const Params& p) {
    const int q_blocks = int((p.Nq + BLOCK_Q - 1) / BLOCK_Q);
    const int shares = daux_shares(p);
    int own = blockIdx.x / shares;
    auto axis = [&](bool is_own, int size) {
        const Axis found(!is_own, is_own ? own % size : 0, size);
        if (is_own) own /= size;
        return found;
    };
    const Axis q = axis(LearnedElement::OWN_I, q_blocks);
    const Axis h = axis(LearnedElement::OWN_H, int(p.Hq));
    const Axis b = axis(LearnedElement::OWN_B, int(p.entries));
    const Axis k(true, 0, (p.Nk + BLOCK_K - 1) / BLOCK_K);
    return {p, b, h, q, k, daux_share(p), shares};
}

// Sum the part of this CTA. for_each(steps, add) calls add(ds, b, h) for the dS of each step. All consumer
// threads call.
template <int BEFORE, class ForEach>
__device__ __forceinline__ void sum_daux(const Params& p, char* memory, ForEach for_each) {
    constexpr int WINDOW = window_of(BEFORE);
    static_assert(WINDOW >= 1, "each thread needs room for a sum");
    const Diagonals diagonals{reinterpret_cast<Accum*>(memory + BEFORE)};
    ElementSums<WINDOW> sums(p, daux_share(p), memory + BEFORE + DIAGONALS_BYTES);
    for_each(daux_steps(p), [&](Scores<false, MT, NT>& ds, int b, int h) {
        const int q0 = ds.row - first_row(), k0 = ds.column - first_column();
        auto pairs = [&](auto visit) {
            ds.for_each([&](Accum x, int i, int j, int, int, int) { visit(x, i, j); });
        };
        if (sums.begin_tile(b, h, q0, k0)) {
            sums.add_to_one(pairs);
        } else if constexpr (LearnedElement::OF_DISTANCE) {
            diagonals.sum(ds);
            sums.add_to_each(b, h, [&](auto visit) { diagonals.for_each(q0, k0, visit); });
        } else {
            sums.add_to_each(b, h, pairs);
        }
    });
    sums.finish();
}
