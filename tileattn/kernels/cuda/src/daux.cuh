// Layer 3. Gradients of the elements that one place of score_mod reads: dS times the derivative by the
// element, summed in float64. A CTA has all rows of tiles whose elements no other has, or a share
// of them with a copy of the sums. The functions' text has that derivative in place of the one by s.
#pragma once

#include "diagonals.cuh"
#include "element_sums.cuh"

// Shared memory behind that of the tiles, and the sums that a thread has for itself there.
constexpr int DIAGONALS_BYTES = LearnedElement::OF_DISTANCE ? Diagonals::BYTES : 0;
constexpr int window_of(int before) {
    return (SHARED_BYTES - before - DIAGONALS_BYTES) / (THREADS * int(sizeof(Accum)));
}

// CTAs that share elements, and this one's number among them.
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

// Sum what belongs to this CTA: for_each(steps, add) calls add(ds, b, h) for the dS of each step. All
// threads that compute call.
template <int BEFORE, class ForEach>
__device__ __forceinline__ void sum_daux(const Params& p, char* memory, ForEach for_each) {
    constexpr int WINDOW = window_of(BEFORE);
    static_assert(WINDOW >= 1, "each thread has a sum of its own");
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
