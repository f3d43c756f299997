// After backward_dkdv: scale dQ and convert it to its dtype. A few lanes take each query. A head whose dQ
// is not finite is flagged, and left to backward_dq.
#include "rows.cuh"

constexpr int LANES = lanes_of_row(HEAD_DIM);

// In dQ_accum, columns 2n and 2n + 1 are neighbours if they have 4 bytes (accum_column).
constexpr int NEIGHBOURS = VECTOR_SIZE < 2 || sizeof(Accum) == 8 ? 1 : 2;
struct alignas(NEIGHBOURS * sizeof(Accum)) Neighbours {
    Accum sums[NEIGHBOURS];
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_dq_convert(const __grid_constant__ Params p) {
    overlap_launches();
    const i64 row = i64(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    const int count = block_count<1>(p, p.Nq);
    if (row >= p.B * p.Hq * count) return;
    const HeadBlock<1> at(p, p.query_ends(), int(p.Hq), int(row / count), int(row % count));
    const int b = at.b, h = at.h, i = at.block;
    const Sequence sequence(p, b);
    if (PACKED && i >= sequence.Nq) return;
    const Accum* sum = static_cast<const Accum*>(p.dq_accum) + (sequence.row(p, h) + i) * HEAD_DIM;
    Element* dq = sequence.queries<Element>(p.dq, p.dq_at, h) + i * p.dq_at.n;
    bool good = true;
    for (int d = threadIdx.x % LANES * VECTOR_SIZE; d < p.D; d += LANES * VECTOR_SIZE) {
        Vector<Element> vector;
#pragma unroll
        for (int e0 = 0; e0 < VECTOR_SIZE; e0 += NEIGHBOURS) {
            const Accum* const from = sum + accum_column<Accum>(d + e0);
            const auto found = *reinterpret_cast<const Neighbours*>(from);
#pragma unroll
            for (int e = 0; e < NEIGHBOURS; ++e) {
                const Accum x = found.sums[e] * Accum(p.scale);
                good = good && is_finite(x);
                vector.values[e0 + e] = narrow<Element>(x);
            }
        }
        store_vector(dq + d, vector, int(p.D) - d);
    }
    if (!good) flag_head(p, b, h / int(p.group), NON_FINITE);
}
