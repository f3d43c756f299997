// Gradients of the elements that one place of score_mod reads: dS times the derivative by the
// element, summed in float64. A CTA has all rows of tiles whose elements no other has, or a share
// of them with a copy of the sums. The functions' text has that derivative in place of the one by s.
#include "ds_tiles.cuh"
#include "element_sums.cuh"

constexpr int SUMS_AT = BIAS_AT + WarpBias<false, MT, NT>::BYTES;
constexpr int WINDOW = (SHARED_BYTES - SUMS_AT) / (THREADS * int(sizeof(Accum)));
static_assert(WINDOW >= 1, "each thread has a sum of its own");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_daux(const __grid_constant__ Params p) {
    extern __shared__ __align__(1024) char memory[];
    const int q_blocks = int((p.Nq + BLOCK_Q - 1) / BLOCK_Q);
    const int shares = int(LearnedElement::sums(p).sizes[0]), share = int(blockIdx.x % shares);
    int own = blockIdx.x / shares;
    auto axis = [&](bool is_own, int size) {
        const Axis found(!is_own, is_own ? own % size : 0, size);
        if (is_own) own /= size;
        return found;
    };
    const Axis q = axis(LearnedElement::OWN_I, q_blocks);
    const Axis h = axis(LearnedElement::OWN_H, int(p.Hq));
    const Axis b = axis(LearnedElement::OWN_B, int(p.B));
    const Axis k(true, 0, (p.Nk + BLOCK_K - 1) / BLOCK_K);

    ElementSums<WINDOW> sums(p, share, memory + SUMS_AT);
    auto add = [&](Scores<false, MT, NT>& ds, int b, int h) {
        auto for_each = [&](auto visit) {
            ds.for_each([&](Accum x, int i, int j, int, int, int) { visit(x, i, j); });
        };
        sums.add_tile(b, h, ds.row - first_row(), ds.column - first_column(), for_each);
    };
    for_each_ds(p, Steps(p, b, h, q, k, share, shares), memory, add);
    sums.finish();
}
