// Probe of splitting.cuh: each function on arrays.
#include "splitting.cuh"

extern "C" __global__ void powers(const float* largest, float* factors, float* inverses,
                                  i64 count) {
    for (i64 n = threadIdx.x; n < count; n += blockDim.x) {
        factors[n] = power_of_two(largest[n]);
        inverses[n] = inverse_power(factors[n]);
    }
}
extern "C" __global__ void splits(const float* x, const float* factors, Split* parts, i64 count) {
    for (i64 n = threadIdx.x; n < count; n += blockDim.x) parts[n] = split(x[n], factors[n]);
}
