// Add up the copies into which the CTAs of backward_daux have summed, in their order: the gradient of an
// array that score_mod reads. One thread for each element.
#include "params.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    backward_daux_sum(const __grid_constant__ Params p) {
    overlap_launches();
    using Value = LearnedElement::Value;
    const LearnedSums& all = LearnedElement::sums(p);
    const i64 n = i64(blockIdx.x) * THREADS + threadIdx.x;
    const i64 elements = all.strides[0] / i64(sizeof(double));
    if (n >= elements) return;
    double total = 0;
    for (i64 copy = 0; copy < all.sizes[0]; ++copy)
        total += reinterpret_cast<const double*>(all.data)[copy * elements + n];
    Value* const gradient = static_cast<Value*>(LearnedElement::gradient(p));
    gradient[n] = narrow<Value>(total);
}
