// Probe of params.cuh: the block as a kernel gets it.
#include "params.cuh"

extern "C" __global__ void received(const __grid_constant__ Params p, Params* out) {
    if (threadIdx.x == 0) *out = p;
}
