// After Hopper's backward kernels: scale dQ and convert it to its dtype. A CTA takes a tile of queries; a
// thread takes 16 columns of a query at a time.
#include "dq_counter.cuh"
#include "rows.cuh"

static_assert(VECTOR_SIZE == 8, "rows are 16-byte aligned");

constexpr int COLUMNS = 16, SLAB_UNITS = DQ_COPY_COLUMNS / COLUMNS, ROW_UNITS = DQ_DIM / COLUMNS;
constexpr int UNITS = BLOCK_Q * ROW_UNITS;
constexpr int TOGETHER = 2;  // units of 16 columns that a thread loads before it stores one

// Four numbers of dQ_accum. stage_dq stores two columns of one atom, then two of the next;
// stage_transposed_dq alternates between the atoms.
struct alignas(16) Accums {
    float x[4];
};

// Convert tile `number` of all query heads, each of which has `tiles`. wait(sequence, kv) returns when dQ of
// its key head is complete.
template <class Wait>
__device__ inline void convert(const Params& p, int tiles, int number, Wait wait) {
    const HeadBlock<BLOCK_Q> at = head_block<BLOCK_Q>(p, number / tiles, number % tiles);
    const int b = at.b, h = at.h, q0 = at.block * BLOCK_Q;
    const int kv = h / int(p.group);
    const Sequence sequence(p, b);
    wait(sequence, kv);
    const u32 flags = head_flags(p, b, kv);
    const bool stored = p.dq_semaphore[number];  // false if these queries attend to no key
    if ((flags & KNOWN) != FLAGGED_HEADS) return;
    const int rows = int(sequence.Nq) - q0, count = min(BLOCK_Q, rows);
    if (PACKED && rows <= 0) return;
    const float* const sums = static_cast<const float*>(p.dq_accum);
    const Accums* const tile =
        reinterpret_cast<const Accums*>(sums + (sequence.row(p, h) + q0) * DQ_DIM);
    Element* const dq = sequence.queries<Element>(p.dq, p.dq_at, h) + q0 * p.dq_at.n;
    const float scale = float(p.scale);
    bool good = true;
#pragma unroll 1
    for (int first = threadIdx.x; first < UNITS; first += TOGETHER * THREADS) {
        Accums found[TOGETHER][4] = {};
        int row[TOGETHER], column[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
            const int unit = (first + n * THREADS) % ROW_UNITS, slab = unit / SLAB_UNITS;
            row[n] = (first + n * THREADS) / ROW_UNITS;
            const int part = row[n] / DQ_ROWS * DQ_ROWS, above = row[n] % DQ_ROWS;
            const int column0 = unit * COLUMNS;
            column[n] = DQ_IS_TRANSPOSED ? column0 ^ above / 4 % 2 * 16 : dq_column(above, column0);
            const int swap = DQ_IS_TRANSPOSED ? above / 2 % 2 * 2 : 0;
            const int width = dq_copy_columns(slab * DQ_COPY_COLUMNS) / COLUMNS;
            const int place = part * ROW_UNITS + slab * SLAB_UNITS * min(DQ_ROWS, count - part) +
                              above * width + unit % SLAB_UNITS;
            if (row[n] < count)
#pragma unroll
                for (int t = 0; t < 4; ++t) found[n][t] = tile[4 * place + (t ^ swap)];
        }
        // The loads do not wait for the semaphore.
        if (!stored) memset(found, 0, sizeof(found));
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n)
#pragma unroll
            for (int atom = 0; atom < 2; ++atom) {
                u32 words[4];
#pragma unroll
                for (int e = 0; e < 8; e += 2) {
                    const float* const x = found[n][e / 2].x + (DQ_IS_TRANSPOSED ? atom : 2 * atom);
                    const float low = x[0] * scale, high = x[DQ_IS_TRANSPOSED ? 2 : 1] * scale;
                    good = good && is_finite(low) && is_finite(high);
                    words[e / 2] = pack<Element>(low, high);
                }
                Vector<Element> vector;
                memcpy(&vector, words, sizeof(vector));
                const int to = column[n] + 8 * atom;
                if (row[n] < count && to < p.D) store_whole(dq + row[n] * p.dq_at.n + to, vector);
            }
    }
    if (!good && !ONLY_FLAGGED) fail_head(p, b, kv);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_dq_convert_sm90(const __grid_constant__ Params p) {
    launch_dependents();
    const int tiles = block_count<BLOCK_Q>(p, p.Nq);
    if constexpr (ONLY_FLAGGED) {
        wait_for_prerequisites();
        auto wait = [](const Sequence&, int) {};
        for_blocks(p, p.B * p.Hq * tiles, [&](int n) { convert(p, tiles, n, wait); });
    } else {
        // The previous kernel leaves SMs idle at its end: CTAs here start with heads that are complete. The
        // last CTA always waits, so this kernel completes after the previous one.
        const bool waits = blockIdx.x == gridDim.x - 1;
        if constexpr (PACKED) pass_kernel_before();  // the offsets of sequences are read first
        convert(p, tiles, dq_tile(p, tiles, int(blockIdx.x)), [&](const Sequence& sequence, int kv) {
            if (waits || !dq_is_complete(p, sequence, kv)) wait_for_prerequisites();
        });
    }
}
