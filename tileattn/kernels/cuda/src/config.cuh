// Layer 3. The key of a kernel: every define of the compiler once, as a typed constant.
#pragma once

#include "fragment.cuh"
#include "griddep.cuh"
#include "ptxas.cuh"

using Element = KEY_DTYPE;
using Accum = AccumOf<Element>::type;

// An absent type is void. Code that is never run takes its elements for floats.
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

constexpr bool IS_16_BIT = sizeof(Element) == 2;
constexpr int HEAD_DIM = KEY_HEAD_DIM;
constexpr int VALUE_DIM = KEY_VALUE_DIM;
constexpr int BLOCK_Q = KEY_BLOCK_Q;
constexpr int BLOCK_K = KEY_BLOCK_K;
constexpr int WARPS_M = KEY_WARPS_M;
constexpr int WARPS_N = KEY_WARPS_N;
constexpr int STAGES = KEY_STAGES;
constexpr int PRODUCER_WARPS = KEY_PRODUCER_WARPS;
constexpr int MIN_BLOCKS_PER_SM = KEY_MIN_BLOCKS_PER_SM;
constexpr int GROUPS = KEY_GROUPS;  // of a CTA, each with WARPS_M x WARPS_N warps
constexpr int ALIGNMENT_BYTES = KEY_ALIGNMENT_BYTES;
constexpr int BIAS_ALIGNMENT_BYTES = KEY_BIAS_ALIGNMENT_BYTES;
constexpr bool HAS_BIAS = Present<KEY_BIAS>::value;
constexpr bool HAS_SOFTCAP = KEY_SOFTCAP;
constexpr bool HAS_ALIBI = KEY_ALIBI;
constexpr bool HAS_MASK = KEY_MASK;
constexpr bool HAS_BLOCK_MASK = KEY_BLOCK_MASK;
constexpr bool HAS_SCORE_MOD = KEY_SCORE_MOD;
constexpr bool HAS_MASK_MOD = KEY_MASK_MOD;
constexpr u64 FUNCTIONS = KEY_FUNCTIONS;  // digest of functions.cuh; 0 for the file beside this one
constexpr bool HAS_DROPOUT = KEY_DROPOUT;
constexpr bool HAS_ORIGIN = KEY_ORIGIN;  // from which dropout counts
constexpr bool PACKED = KEY_PACKED;  // sequences lie one behind the other in one batch entry
constexpr bool PAGED = KEY_PAGED;    // keys are in pages, which a block table says
constexpr bool SPLIT_KV = KEY_SPLIT_KV;  // keys are cut, and all rows that share them are one tile
constexpr bool FOLD = KEY_FOLD_SCALE;
constexpr bool ADD_DQ = KEY_ADD_DQ;
constexpr bool HEAD_MAJOR = KEY_HEAD_MAJOR;  // query heads that share keys come one after the other
constexpr bool WRITE_DBIAS = KEY_WRITE_DBIAS;
constexpr u32 FLAGGED_HEADS = KEY_HEAD_FLAGS;  // heads with one of these flags; 0 for all
constexpr bool ONLY_FLAGGED = FLAGGED_HEADS != 0;
constexpr int MASK_VECTOR_WIDTH = KEY_MASK_VECTOR_WIDTH;
constexpr int SHARED_BYTES = KEY_SMEM_BYTES;

// Columns of a CTA: of two that share a work tile, each has half of all.
constexpr bool PAIR = KEY_PAIR;
constexpr int HEAD_COLUMNS = HEAD_DIM / (PAIR ? 2 : 1);
constexpr int VALUE_COLUMNS = VALUE_DIM / (PAIR ? 2 : 1);

// Which work tile is that of this CTA, where they take one each.
__device__ inline int work_index() { return int(blockIdx.x) / (PAIR ? 2 : 1); }

// Columns of Hopper's dQ_accum.
constexpr int DQ_DIM = (HEAD_DIM + 31) / 32 * 32;

// The rows and columns of a dQ tile that one bulk copy of Hopper's backward kernels adds. These are
// contiguous; the next columns of the same rows follow.
// Where its queries do not fill 64 rows of a GEMM dQ is computed transposed: 64 columns are its
// rows.
constexpr bool DQ_IS_TRANSPOSED = BLOCK_Q % 64 > 0;
constexpr int DQ_ROWS = DQ_IS_TRANSPOSED ? BLOCK_Q : 64;
constexpr int DQ_COPY_COLUMNS = DQ_IS_TRANSPOSED ? 64 : 32;

// Columns that a copy from this one on has: the last may have fewer, or none.
__device__ constexpr int dq_copy_columns(int column) {
    return DQ_DIM % 64 == 0 ? DQ_COPY_COLUMNS : max(0, min(DQ_COPY_COLUMNS, DQ_DIM - column));
}

// Scores of any size, -infinity among them; and score modifiers whose derivative is not 1.
constexpr bool HAS_ANY_SCORES = HAS_BIAS || HAS_SCORE_MOD;
constexpr bool HAS_SCORE_GRAD = HAS_SOFTCAP || HAS_SCORE_MOD;
// Rows that may have scores of any size are taken as large from the beginning. Hopper's kernels take
// them as bounded, and come back to those that are not.
constexpr bool ALL_ROWS_MAX_FIRST = HAS_ANY_SCORES && PRODUCER_WARPS == 0;

// Lazy rescaling of Hopper's forward kernel: row maxima may lag by so many powers of two before O is
// rescaled. P in 16 bits has room for it, and the result depends on it by rounding alone.
constexpr int RESCALE_THRESHOLD = HAS_FINITE_SUMS<Element> ? 4 : 8;

// P times a power of two, where P is rounded to float16. Numbers of float16 lose digits below 2**-14,
// and are 0 below 2**-25: beside an attention sink that is the P of all other keys. Where their
// scores are alike so is their rounding, which does not average out: not in out, nor in delta, which
// is made of it. The power costs nothing, since it is a constant in the exponent. Forward, where P
// may exceed 1 by RESCALE_THRESHOLD, it is 2**11, and P * 2**11 is 2**15 at most: the largest number
// is 65504. Backward, where P is 1 at most, it is 2**15. So P has all its digits from 2**-25, or from
// 2**-29.
constexpr int FORWARD_P_LOG2 = HAS_FINITE_SUMS<Element> ? 15 - RESCALE_THRESHOLD : 0;
constexpr int BACKWARD_P_LOG2 = HAS_FINITE_SUMS<Element> ? 15 : 0;
constexpr Accum FORWARD_P_UNIT = Accum(1) / (1 << FORWARD_P_LOG2);
constexpr Accum BACKWARD_P_UNIT = Accum(1) / (1 << BACKWARD_P_LOG2);

// Hopper's kernels: whether the tiles of a block may come from a list.
constexpr bool HAS_TILE_LIST = HAS_BLOCK_MASK || HAS_MASK_MOD;

// The warp of a thread among those of its group.
__device__ inline u32 warp_of_group() {
    const u32 warp = threadIdx.x / WARP;
    return GROUPS == 1 ? warp : warp % (WARPS_M * WARPS_N);
}

// How far GEMM loops are unrolled. The NaN-safe path rarely runs, and compiles sooner with few
// steps. In float64 few steps need fewer registers: half of them at a time, and two in pairs.
template <bool NAN_SAFE, int DEPTH>
constexpr int STEPS = NAN_SAFE                 ? (sizeof(Element) == 2 ? 4 : 2)
                      : sizeof(Element) == 8   ? (PAIR || DEPTH <= 64 ? 2 : DEPTH / 32)
                                               : DEPTH / 16;

constexpr int THREADS = WARP * WARPS_M * WARPS_N;  // of a group

// Hardware barriers, each a first number. 0 is __syncthreads.
enum class NamedBarrier {
    ROW_GROUP = 1,  // warps that share rows: one for each group
    WARPGROUP = 1,  // in Hopper's kernels: one for each consumer warpgroup
    CONSUMERS = WARPGROUP + GROUPS * WARPS_M / 4  // all of these, for each group
};
__device__ constexpr int barrier_id(NamedBarrier barrier, int offset = 0) {
    return int(barrier) + offset;
}
constexpr int CONSUMER_BARRIER = barrier_id(NamedBarrier::CONSUMERS);

// Wait for all threads of the CTA but a producer's.
__device__ inline void sync_threads() {
    if constexpr (PRODUCER_WARPS == 0)
        __syncthreads();
    else
        asm volatile("barrier.cta.sync %0, %1;" ::"n"(CONSUMER_BARRIER), "n"(THREADS) : "memory");
}

static_assert(HEAD_COLUMNS % 16 == 0 && VALUE_COLUMNS % 16 == 0, "a k-step of mma is 16 deep");
static_assert(BLOCK_Q % 16 == 0 && BLOCK_K % 16 == 0,
              "rows of an mma atom, and dropout in 16 x 16");
static_assert(BIAS_ALIGNMENT_BYTES == 0 ||
                  (BIAS_ALIGNMENT_BYTES >= 4 && BIAS_ALIGNMENT_BYTES % sizeof(BiasElement) == 0),
              "elements of the bias are not split");
static_assert(!(FOLD && (HAS_SOFTCAP || HAS_ALIBI || HAS_BIAS || HAS_SCORE_MOD)),
              "score modifiers come after the scale");

constexpr Accum LOG2_E = Accum(1.4426950408889634073599246810019);
constexpr Accum LN_2 = Accum(0.69314718055994530941723212145818);
