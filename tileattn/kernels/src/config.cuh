// Layer 3. The key of a kernel: every define of the compiler once, as a typed constant.
#pragma once

#include "fragment.cuh"

using Element = KEY_DTYPE;
using Sum = SumOf<Element>::type;

// An absent type is void, of which there are no elements: code that is never run takes them for
// floats.
template <class T>
struct Present {
    using type = T;
    static constexpr bool value = true;
};
template <>
struct Present<void> {
    using type = float;
    static constexpr bool value = false;
};
using BiasElement = Present<KEY_BIAS>::type;

constexpr int HEAD_DIM = KEY_HEAD_DIM;
constexpr int VALUE_DIM = KEY_VALUE_DIM;
constexpr int BLOCK_Q = KEY_BLOCK_Q;
constexpr int BLOCK_K = KEY_BLOCK_K;
constexpr int WARPS_M = KEY_WARPS_M;
constexpr int WARPS_N = KEY_WARPS_N;
constexpr int STAGES = KEY_STAGES;
constexpr int LOADERS = KEY_LOADERS;
constexpr int RESIDENTS = KEY_RESIDENTS;
constexpr int VECTOR = KEY_VECTOR;
constexpr int BIAS_VECTOR = KEY_BIAS_VECTOR;
constexpr bool HAS_BIAS = Present<KEY_BIAS>::value;
constexpr bool HAS_SOFTCAP = KEY_SOFTCAP;
constexpr bool HAS_ALIBI = KEY_ALIBI;
constexpr bool HAS_MASK = KEY_MASK;
constexpr bool HAS_BLOCK_MASK = KEY_BLOCK_MASK;
constexpr bool HAS_DROPOUT = KEY_DROPOUT;
constexpr bool FOLD = KEY_FOLD;
constexpr bool ADD_DQ = KEY_ADD_DQ;
constexpr bool WRITE_DBIAS = KEY_WRITE_DBIAS;
constexpr u32 REPAIRS = KEY_REPAIRS;  // marks of the heads that it repairs; 0 where it does all heads
constexpr int SPAN = KEY_SPAN;
constexpr int SHARED_BYTES = KEY_SHARED;

// Of Hopper's own backward kernels: which of the two has such heads, and how many rows and columns of
// a tile of dq are added at a time. They lie together; then come the next columns of these rows.
constexpr bool IS_WIDE = HEAD_DIM > 128 || VALUE_DIM > 128;
constexpr int DQ_ROWS = 64, DQ_PIECE = 32;
constexpr int ADDERS = 2;  // threads that add them

// Steps of a product that are laid out one after the other. The NaN-safe pass rarely runs, and is
// compiled sooner with few.
template <bool CAREFUL, int DEPTH>
constexpr int STEPS = CAREFUL ? (sizeof(Element) == 2 ? 4 : 2) : DEPTH / 16;

constexpr int THREADS = WARP * WARPS_M * WARPS_N;

static_assert(HEAD_DIM % 16 == 0 && VALUE_DIM % 16 == 0, "columns come in pairs of atoms");
static_assert(BLOCK_Q % 16 == 0 && BLOCK_K % 16 == 0, "rows come in atoms, dropout in 16 x 16");
static_assert(BIAS_VECTOR == 0 || (BIAS_VECTOR >= 4 && BIAS_VECTOR % sizeof(BiasElement) == 0),
              "elements of the bias are copied whole");
static_assert(!(FOLD && (HAS_SOFTCAP || HAS_ALIBI || HAS_BIAS)), "terms follow the scale");

constexpr Sum LOG2_E = Sum(1.4426950408889634073599246810019);
constexpr Sum LN_2 = Sum(0.69314718055994530941723212145818);
