// Layer 3. score_mod and mask_mod of one head. This file is for calls without them. For other calls the
// host generates a file of this name (families/cuda_text.py).
#pragma once

#include "config.cuh"
#include "numpy.cuh"

static_assert(FUNCTIONS == 0, "a call with functions has a generated file");

struct AuxArrays {};

struct ScoreFunction {
    __device__ ScoreFunction(const AuxArrays&, i64, i64) {}
    template <class Score>
    __device__ Accum score(Score s, int, int, Accum& grad) const { return grad = 1, s; }
};

struct MaskFunction {
    __device__ MaskFunction(const AuxArrays&, i64, i64) {}
    __device__ bool visible(int, int) const { return true; }
    __device__ int kind(int, int) const { return 2; }  // FULL
};
