// Layer 3. The key of a kernel: each KEY_* macro that the host defines, as a typed constant.
#pragma once

#include "fragment.cuh"
#include "griddep.cuh"
#include "ptxas.cuh"

using Element = KEY_DTYPE;
using Accum = AccumOf<Element>::type;

// `void` stands for an absent type. Code for it still compiles, with another type in its place.
template <class T, class Absent = float>
struct Present {
    using type = T;
    static constexpr bool value = true;
};
template <class Absent>
struct Present<void, Absent> {
    using type = Absent;
    static constexpr bool value = false;
};
using BiasElement = Present<KEY_BIAS>::type;

constexpr bool IS_16_BIT = sizeof(Element) == 2;

// The kernel computes with two float16 numbers for each element of float32 (splitting.cuh).
constexpr bool SPLIT_FLOATS = KEY_SPLIT_FLOATS;
static_assert(!SPLIT_FLOATS || sizeof(Element) == 4, "float32 is split");

// The types of keys and values, and of operands of GEMMs with them. Both are Element unless keys and
// values have 8 bits, or float32 is split.
template <bool TO_HALVES>
struct OperandOf {
    using type = Element;
};
template <>
struct OperandOf<true> {
    using type = float16;
};
constexpr bool QUANTISED = Present<KEY_KV_DTYPE>::value;
using KvElement = Present<KEY_KV_DTYPE, Element>::type;
using Operand = OperandOf<(QUANTISED && IS_16_BIT) || SPLIT_FLOATS>::type;

constexpr int HEAD_DIM = KEY_HEAD_DIM;
constexpr int VALUE_DIM = KEY_VALUE_DIM;
constexpr int BLOCK_Q = KEY_BLOCK_Q;
constexpr int BLOCK_K = KEY_BLOCK_K;
constexpr int WARPS_M = KEY_WARPS_M;
constexpr int WARPS_N = KEY_WARPS_N;
constexpr int STAGES = KEY_STAGES;
constexpr int PRODUCER_WARPS = KEY_PRODUCER_WARPS;
constexpr int MIN_BLOCKS_PER_SM = KEY_MIN_BLOCKS_PER_SM;
constexpr int GROUPS = KEY_GROUPS;  // independent consumer groups of a CTA, each WARPS_M x WARPS_N warps
constexpr int ALIGNMENT_BYTES = KEY_ALIGNMENT_BYTES;
constexpr int BIAS_ALIGNMENT_BYTES = KEY_BIAS_ALIGNMENT_BYTES;
constexpr bool HAS_BIAS = Present<KEY_BIAS>::value;
constexpr bool HAS_SOFTCAP = KEY_SOFTCAP;
constexpr bool HAS_ALIBI = KEY_ALIBI;
constexpr bool HAS_MASK = KEY_MASK;
constexpr bool HAS_BLOCK_MASK = KEY_BLOCK_MASK;
constexpr bool HAS_SCORE_MOD = KEY_SCORE_MOD;
constexpr bool HAS_MASK_MOD = KEY_MASK_MOD;
constexpr u64 FUNCTIONS = KEY_FUNCTIONS;  // digest of the generated functions.cuh; 0: the file in this folder
constexpr bool HAS_DROPOUT = KEY_DROPOUT;
constexpr bool HAS_ORIGIN = KEY_ORIGIN;  // dropout counts indices from p.origin
constexpr bool PACKED = KEY_PACKED;      // variable-length sequences, packed into one batch entry
constexpr bool PAGED = KEY_PAGED;        // keys and values are in pages of a block table
constexpr bool GATHERED = KEY_GATHERED;  // Hopper forward: threads copy their rows, since a tile may end in a page
constexpr bool SPLIT_KV = KEY_SPLIT_KV;  // split-KV; a tile has the rows of all query heads of a key head
constexpr bool INVARIANT = KEY_INVARIANT;  // sums over splits of the keys are added in the order of the keys
constexpr bool TOTALS = INVARIANT && !SPLIT_KV;  // Hopper forward: the kernel itself adds them (running_total.cuh)
constexpr bool FOLD = KEY_FOLD_SCALE;    // no score modifiers: the scale is part of the exponent
constexpr bool ADD_DQ = KEY_ADD_DQ;      // the dK and dV kernel adds dQ in memory, too
constexpr bool WRITE_DQ = KEY_WRITE_DQ;  // ADD_DQ, but one block has all keys: it writes dQ itself
constexpr bool HEAD_MAJOR = KEY_HEAD_MAJOR;  // backward: heads are the outer loop, query tiles the inner one
constexpr bool SPLIT_Q = KEY_SPLIT_Q;        // backward: work tiles share a key block (query_split.cuh)
constexpr bool WRITE_DBIAS = KEY_WRITE_DBIAS;
constexpr u32 FLAGGED_HEADS = KEY_HEAD_FLAGS;  // compute only heads with one of these flags; 0: all heads
constexpr bool ONLY_FLAGGED = FLAGGED_HEADS != 0;
constexpr int MASK_VECTOR_WIDTH = KEY_MASK_VECTOR_WIDTH;
constexpr int SHARED_BYTES = KEY_SMEM_BYTES;

// With PAIR two CTAs share a work tile, and each has half of the columns.
constexpr bool PAIR = KEY_PAIR;
constexpr int HEAD_COLUMNS = HEAD_DIM / (PAIR ? 2 : 1);
constexpr int VALUE_COLUMNS = VALUE_DIM / (PAIR ? 2 : 1);

// The index of this CTA's work tile, in kernels with one work tile for each CTA (or pair).
__device__ inline int work_index() { return int(blockIdx.x) / (PAIR ? 2 : 1); }

// Columns of Hopper's dQ_accum.
constexpr int DQ_DIM = (HEAD_DIM + 31) / 32 * 32;

// dQ_accum of Hopper's backward kernels is stored in the blocks that one bulk copy adds: DQ_ROWS rows of
// DQ_COPY_COLUMNS columns are contiguous, and the next columns of the same rows follow. If BLOCK_Q is not a
// multiple of the 64 rows of a GEMM, dQ is computed transposed, with 64 of its columns as the rows.
constexpr bool DQ_IS_TRANSPOSED = BLOCK_Q % 64 > 0;
constexpr int DQ_ROWS = DQ_IS_TRANSPOSED ? BLOCK_Q : 64;
constexpr int DQ_COPY_COLUMNS = DQ_IS_TRANSPOSED ? 64 : 32;

// Columns of the copy that starts at `column`: the last copy may have fewer, or none.
__device__ constexpr int dq_copy_columns(int column) {
    return DQ_DIM % 64 == 0 ? DQ_COPY_COLUMNS : max(0, min(DQ_COPY_COLUMNS, DQ_DIM - column));
}

// A bias or a score_mod may give scores of any size, -infinity included. A softcap or a score_mod has a
// derivative other than 1.
constexpr bool HAS_ANY_SCORES = HAS_BIAS || HAS_SCORE_MOD;
constexpr bool HAS_SCORE_GRAD = HAS_SOFTCAP || HAS_SCORE_MOD;
// Generic kernels subtract the maximum first in all rows whose scores may have any size. Hopper's kernels
// assume bounded scores, and redo the rows that are not.
constexpr bool ALL_ROWS_MAX_FIRST = HAS_ANY_SCORES && PRODUCER_WARPS == 0;

// Lazy rescaling of Hopper's forward kernel: the shift of a row may lag its maximum by this many powers of
// two before O is rescaled. 16-bit P has the range for it; only the rounding of the result depends on it.
constexpr int RESCALE_THRESHOLD = HAS_FINITE_SUMS<Operand> ? 4 : 8;

// P in float16 is multiplied by a power of two before it is rounded. float16 loses digits below 2**-14, and is
// 0 below 2**-25: with an attention sink all other keys may have such a P. If their scores are similar,
// their rounding errors are, too, and do not average out in out or in delta. The factor costs nothing: it
// is a constant in the exponent. Forward it is 2**11: P may reach 2**RESCALE_THRESHOLD = 2**4, and 2**15 is
// below the largest float16, 65504. Backward it is 2**15: P is at most 1. So P keeps all its digits down to
// 2**-25 forward, and 2**-29 backward.
//
// Backward, P of float32 has 2**8. P of a few hundred keys is about 2**-8, and its exponent is rounded less if it
// is near 0.
constexpr int FORWARD_P_LOG2 = HAS_FINITE_SUMS<Operand> ? 15 - RESCALE_THRESHOLD : 0;
constexpr int BACKWARD_P_LOG2 = HAS_FINITE_SUMS<Element> ? 15 : sizeof(Element) == 4 ? 8 : 0;
constexpr Accum FORWARD_P_UNIT = Accum(1) / (1 << FORWARD_P_LOG2);
constexpr Accum BACKWARD_P_UNIT = Accum(1) / (1 << BACKWARD_P_LOG2);

// Hopper's kernels: true if the tiles of a block may come from a list.
constexpr bool HAS_TILE_LIST = HAS_BLOCK_MASK || HAS_MASK_MOD;

// The index of this warp in its group.
__device__ inline u32 warp_of_group() {
    const u32 warp = threadIdx.x / WARP;
    return GROUPS == 1 ? warp : warp % (WARPS_M * WARPS_N);
}

// Unroll factor of GEMM loops. The NaN-safe path rarely runs, and compiles faster with few steps. In
// float64 fewer steps need fewer registers: half of all, or two if DEPTH is small or CTAs are paired.
template <bool NAN_SAFE, int DEPTH>
constexpr int STEPS = NAN_SAFE                 ? (sizeof(Element) == 2 ? 4 : 2)
                      : sizeof(Element) == 8   ? (PAIR || DEPTH <= 64 ? 2 : DEPTH / 32)
                                               : DEPTH / 16;

constexpr int THREADS = WARP * WARPS_M * WARPS_N;  // of a group

// Named barriers: the first id of each kind. Id 0 is __syncthreads.
enum class NamedBarrier {
    ROW_GROUP = 1,  // generic kernels: the warps that share rows
    WARPGROUP = 1,  // Hopper's kernels: each consumer warpgroup
    CONSUMERS = WARPGROUP + GROUPS * WARPS_M / 4  // Hopper's kernels: all consumers of a group
};
__device__ constexpr int barrier_id(NamedBarrier barrier, int offset = 0) {
    return int(barrier) + offset;
}
constexpr int CONSUMER_BARRIER = barrier_id(NamedBarrier::CONSUMERS);

// Wait for all threads of the CTA except the producer's.
__device__ inline void sync_threads() {
    if constexpr (PRODUCER_WARPS == 0)
        __syncthreads();
    else
        asm volatile("barrier.cta.sync %0, %1;" ::"n"(CONSUMER_BARRIER), "n"(THREADS) : "memory");
}

static_assert(HEAD_COLUMNS % 16 == 0 && VALUE_COLUMNS % 16 == 0, "a k-step of mma is 16 deep");
static_assert(ADD_DQ || !WRITE_DQ, "dQ is computed");
static_assert(BLOCK_Q % 16 == 0 && BLOCK_K % 16 == 0,
              "rows of an mma atom, and dropout in 16 x 16");
static_assert(BIAS_ALIGNMENT_BYTES == 0 ||
                  (BIAS_ALIGNMENT_BYTES >= 4 && BIAS_ALIGNMENT_BYTES % sizeof(BiasElement) == 0),
              "elements of the bias are not split");
static_assert(!(FOLD && (HAS_SOFTCAP || HAS_ALIBI || HAS_BIAS || HAS_SCORE_MOD)),
              "score modifiers come after the scale");

constexpr double EXACT_LOG2_E = 1.4426950408889634073599246810019;
constexpr Accum LOG2_E = Accum(EXACT_LOG2_E), LOG2_E_LOW = Accum(EXACT_LOG2_E - double(LOG2_E));
constexpr Accum LN_2 = Accum(0.69314718055994530941723212145818);

// Reductions over the lanes of a warp.
__device__ inline Accum warp_sum(Accum x) {
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
__device__ inline Accum warp_maximum(Accum x) {
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) x = fmax(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
