// Probe of types.cuh: each conversion and function on arrays.
#include "config.cuh"

template <class In, class Out, class Function>
__device__ void for_each(const In* x, Out* y, i64 count, Function function) {
    for (i64 n = threadIdx.x; n < count; n += blockDim.x) y[n] = function(x[n]);
}

extern "C" __global__ void widened(const Element* x, Accum* y, i64 count) {
    for_each(x, y, count, [](Element one) { return widen(one); });
}
extern "C" __global__ void narrowed(const float* x, Element* y, i64 count) {
    for_each(x, y, count, [](float one) { return narrow<Element>(one); });
}
extern "C" __global__ void narrowed_doubles(const double* x, Element* y, i64 count) {
    for_each(x, y, count, [](double one) { return narrow<Element>(one); });
}
extern "C" __global__ void exp2s(const Accum* x, Accum* y, i64 count) {
    for_each(x, y, count, [](Accum one) { return exp2_of(one); });
}
extern "C" __global__ void log2s(const Accum* x, Accum* y, i64 count) {
    for_each(x, y, count, [](Accum one) { return log2_of(one); });
}
extern "C" __global__ void finite_ones(const Accum* x, bool* y, i64 count) {
    for_each(x, y, count, [](Accum one) { return is_finite(one); });
}
extern "C" __global__ void limits(Accum* y) {
    if (threadIdx.x == 0) y[0] = largest<Accum>(), y[1] = infinity<Accum>();
}

struct Two {
    float low, high;
};
template <class T>
__device__ void pack_all(const Two* x, u32* y, i64 count) {
    if constexpr (sizeof(T) == 2)
        for_each(x, y, count, [](Two two) { return pack<T>(two.low, two.high); });
}
extern "C" __global__ void packed(const Two* x, u32* y, i64 count) {
    pack_all<Element>(x, y, count);
}
