// Layer 3. One query head: its rows, mask, score modifiers, dropout and row statistics.
#pragma once

#include "head_flags.cuh"
#include "score_tile.cuh"
#include "softmax.cuh"

__device__ inline Accum sink_of(const Params& p, i64 h) {
    return p.sinks ? static_cast<const Accum*>(p.sinks)[h] : -infinity<Accum>();
}

// lse_log2 and delta as stored for the backward pass. They give P its power of two (config.cuh), and take
// it out of dS.
__device__ inline Accum stored_lse(Accum lse_log2) {
    return BACKWARD_P_LOG2 == 0 ? lse_log2 : lse_log2 - Accum(BACKWARD_P_LOG2);
}
// The same from a natural logarithm, rounded once or twice near 0.
__device__ inline Accum stored_natural_lse(Accum lse) {
    if constexpr (sizeof(Element) != 4) return stored_lse(clip_finite(lse * LOG2_E));
    return clip_finite(fma(lse, LOG2_E_LOW, fma(lse, LOG2_E, -Accum(BACKWARD_P_LOG2))));
}
__device__ inline Accum stored_delta(Accum delta) { return delta * BACKWARD_P_UNIT; }

// One query head of one sequence.
struct Head {
    const Params& p;
    Sequence sequence;
    i64 b, h;
    const Element *q, *k, *v, *dout;
    AttentionMask attn_mask;
    ScoreMod score_mod;
    Dropout dropout;

    __device__ Head(const Params& p, i64 b, i64 h)
        : p(p),
          sequence(p, b),
          b(b),
          h(h),
          q(sequence.queries<Element>(p.q, p.q_at, h)),
          k(sequence.keys<Element>(p.k, p.k_at, int(h) / int(p.group))),
          v(sequence.keys<Element>(p.v, p.v_at, int(h) / int(p.group))),
          dout(sequence.queries<Element>(p.dout, p.dout_at, h)),
          attn_mask(p, b, h),
          score_mod(p, b, h),
          dropout(p, b, h) {
        // Keep the four pointers in registers: the compiler would recompute them for every tile.
        asm volatile("" : "+l"(q), "+l"(k), "+l"(v), "+l"(dout));
    }

    __device__ i64 Nq() const { return sequence.Nq; }
    __device__ i64 row(int i) const { return sequence.row(p, h) + i; }

    // Row statistics of backward_preprocess. In LARGE_SCORES heads backward_large_scores replaces lse_log2
    // and row_max.
    __device__ Accum* statistics(void* array) const {
        return static_cast<Accum*>(array) + sequence.padded_row(p, h);
    }
    __device__ Accum* lse_log2() const { return statistics(p.lse_log2); }
    __device__ Accum* delta() const { return statistics(p.delta); }
    __device__ Accum* row_max() const { return statistics(p.row_max); }
    __device__ bool needs_max_first() const { return head_flags(p, b, int(h) / int(p.group)) & LARGE_SCORES; }

    __device__ Accum sink() const { return sink_of(p, h); }

    __device__ Accum score(int i, int j) const {
        Accum dsoftcap, dfunction;
        return score(i, j, dsoftcap, dfunction);
    }
    // The score of a pair before score_mod.softmax_scale_log2(); -infinity if it is masked out.
    __device__ Accum score(int i, int j, Accum& dsoftcap, Accum& dfunction) const {
        dsoftcap = dfunction = 1;
        if (!attn_mask.visible(i, j)) return -infinity<Accum>();
        Accum product = 0;
        for (int d = 0; d < p.D; ++d)
            product =
                fma(Accum(widen(q[i * p.q_at.n + d])), Accum(widen(k[j * p.k_at.n + d])), product);
        return score_mod.score(product, i, j, score_mod.bias_of(i, j), dsoftcap, dfunction);
    }
};
