// Layer 3. GEMMs of a warp in the backward pass if float32 is split (split_gemm.cuh).
#pragma once

#include "gradient.cuh"
#include "planes.cuh"
#include "split_gemm.cuh"

// The rows of a warp, which stay throughout: in registers if there are enough, else in shared memory.
template <bool HELD, class Planes, int K>
struct FirstOperandOf : StagedOperand<Planes, K> {
    using StagedOperand<Planes, K>::StagedOperand;
};
template <class Planes, int K>
struct FirstOperandOf<true, Planes, K> : SplitOperand<K> {
    __device__ FirstOperandOf(const Planes& tile, int row)
        : SplitOperand<K>(StagedOperand<Planes, K>(tile, row).held()) {}
};
constexpr bool HELD = HEAD_DIM <= 64 && VALUE_DIM <= 64;
constexpr bool IN_TURN = true;  // registers are few
template <class Planes, int COLUMNS>
using FirstOperand = FirstOperandOf<HELD, Planes, COLUMNS / 16>;

// C += X Y: each row of X is split with its factor. `inverse` is the inverse factor of Y.
template <class Planes, int KT, int NT>
__device__ inline void add_split_rows(Fragment<Accum, 1, NT>& c, const Fragment<Accum, 1, KT>& x,
                                      const float (&factor)[2], const Planes& y, float inverse) {
    SplitOperand<KT / 2> operands[1];
    operands[0].split(x, factor);
    split_multiply_add<IN_TURN>(c, operands, y, {{inverse_power(factor[0]) * inverse, inverse_power(factor[1]) * inverse}});
}

// The same with the power of two of each row of dS.
template <class Planes, int KT, int NT>
__device__ inline void add_split_gradient(Fragment<Accum, 1, NT>& c, const Fragment<Accum, 1, KT>& ds,
                                          const Planes& y, float inverse) {
    float factor[2];
    row_factors(ds, factor);
    add_split_rows(c, ds, factor, y, inverse);
}
