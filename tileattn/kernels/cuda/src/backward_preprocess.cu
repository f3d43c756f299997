// Before the backward pass: compute delta = rowsum(dO * O) - dlse and the logsumexp in base 2, which is 0
// for rows that attend to nothing. Mirrors preprocess in spec.py. A few lanes take each query. The rows of
// a head, or of a packed sequence, are padded to whole blocks of queries, so that later kernels load them
// without bounds checks. This kernel also sets the flags of heads: in other heads the statistics are finite,
// and precise enough for P. It goes head by head, since Hopper's kernels start with heads that are complete
// (row_counter.cuh).
#include "row_counter.cuh"
#include "rows.cuh"

// A lane takes several vectors: more lanes would repeat the work that each row needs once.
constexpr int VECTORS = lanes_of_row(VALUE_DIM) < 4 ? lanes_of_row(VALUE_DIM) : 4;
constexpr int LANES = lanes_of_row(VALUE_DIM) / VECTORS, ROWS = WARP / LANES;
constexpr int TOGETHER = 4;  // the most blocks of ROWS rows that a warp counts at a time
static_assert(ROW_PAD % (TOGETHER * ROWS) == 0, "a warp has rows of one head and sequence");

// The rounding of a larger logsumexp would be visible in the gradients. In float32 the rounding of such scores is as
// large up to here (H200: docs/tuning-log.md).
constexpr Accum MAX_EXACT_LSE = sizeof(Element) == 2 ? 512 : sizeof(Element) == 4 ? 32 : 16;

using PaddedBlock = HeadBlock<ROW_PAD, ROW_BLOCKS>;

// Process the rows of a warp: query head `bh` of all batch entries, from row0 of its padded rows on, which
// is in the block `at`.
__device__ inline void preprocess(const Params& p, const Sequence& sequence, const PaddedBlock& at, i64 bh,
                                  int row0) {
    const int lane = threadIdx.x % WARP, padded = row0 + lane / LANES;
    const int b = at.b, h = at.h, i = at.block * ROW_PAD + padded % ROW_PAD;
    Accum delta = 0, lse = 0;
    if (i < sequence.Nq) {
        lse = static_cast<const Accum*>(p.lse)[sequence.row(p, h) + i];
        const Element* out = sequence.queries<Element>(p.out, p.out_at, h) + i * p.out_at.n;
        const Element* dout = sequence.queries<Element>(p.dout, p.dout_at, h) + i * p.dout_at.n;
        const int columns = int(p.Dv), d0 = threadIdx.x % LANES * VECTOR_SIZE;
        constexpr int STEP = LANES * VECTOR_SIZE;
        auto add = [&](const Vector<Element>& x, const Vector<Element>& y) {
#pragma unroll
            for (int e = 0; e < VECTOR_SIZE; ++e)
                delta = fma(Accum(widen(x.values[e])), Accum(widen(y.values[e])), delta);
        };
        if (columns % VECTOR_SIZE) {
#pragma unroll 1
            for (int d = d0; d < columns; d += STEP)
                add(load_vector(out + d, columns - d), load_vector(dout + d, columns - d));
        } else {
            for (int first = d0; first < columns; first += VECTORS * STEP) {
                Vector<Element> x[VECTORS], y[VECTORS];
#pragma unroll
                for (int n = 0; n < VECTORS; ++n)
                    x[n] = load_whole(out, first + n * STEP, columns), y[n] = load_whole(dout, first + n * STEP, columns);
#pragma unroll
                for (int n = 0; n < VECTORS; ++n) add(x[n], y[n]);
            }
        }
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) delta += __shfl_xor_sync(~0u, delta, step);
    // Past the end P must be 0.
    Accum stored = infinity<Accum>();
    u32 found = 0;
    if (i < sequence.Nq) {
        if (p.dlse) delta -= sequence.queries<Accum>(p.dlse, p.dlse_at, h)[i * p.dlse_at.n];
        const bool masked_out = lse == -infinity<Accum>();
        if (!is_finite(delta)) delta = infinity<Accum>() - infinity<Accum>(), found |= NON_FINITE;
        if (masked_out ? !is_finite_row<LANES>(
                             sequence.queries<Element>(p.q, p.q_at, h) + i * p.q_at.n, int(p.D))
                       : !is_finite(lse))
            found |= NON_FINITE;
        if (is_finite(lse) && fabs(lse) > MAX_EXACT_LSE) found |= LARGE_SCORES;
        stored = masked_out ? stored_lse(0) : is_finite(lse) ? stored_natural_lse(lse) : lse;
    }
    if (__any_sync(~0u, found)) {
        const bool non_finite = __any_sync(~0u, found & NON_FINITE);
        const bool large = __any_sync(~0u, found & LARGE_SCORES);
        const u32 marks = (non_finite ? NON_FINITE : 0) | (large ? LARGE_SCORES : 0);
        if (lane == 0) flag_head(p, b, h / int(p.group), marks);
    }
    if (lane % LANES == 0) {
        const i64 row = bh * p.rows + padded;
        static_cast<Accum*>(p.delta)[row] = stored_delta(delta);
        static_cast<Accum*>(p.lse_log2)[row] = stored;
        // backward_large_scores replaces it in LARGE_SCORES heads, unless the call has no keys.
        static_cast<Accum*>(p.row_max)[row] = 0;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_preprocess(const __grid_constant__ Params p) {
    // In this order: kernels that start beside this one then follow all earlier kernels (griddep.cuh).
    wait_for_prerequisites();
    launch_dependents();
    // Each time it counts rows a warp waits for its stores. So it processes several blocks of rows at a
    // time, if there are enough for all warps.
    const i64 warps = i64(gridDim.x) * (THREADS / WARP), blocks = p.rows / ROWS;
    const i64 total = p.B * p.Hq * blocks, each = total < TOGETHER * warps ? 1 : TOGETHER;
    i64 n = (i64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP) * each;
#pragma unroll 1
    for (; n < total; n += warps * each) {
        const i64 bh = n / blocks;
        const int row0 = int(n % blocks) * ROWS;
        const PaddedBlock at = head_block<ROW_PAD, ROW_BLOCKS>(p, int(bh), row0 / ROW_PAD);
        const Sequence sequence(p, at.b);
#pragma unroll 1
        for (int m = 0; m < each; ++m) preprocess(p, sequence, at, bh, row0 + m * ROWS);
        count_rows(p, bh / p.group, int(each) * ROWS);
    }
}
