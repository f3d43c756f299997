// Probe of tile.cuh: what a tile holds after a load, and what a store makes of the target.
#include "config.cuh"

using X = Tile<Element, BLOCK_Q, HEAD_DIM>;

extern "C" __global__ void copied(const Element* source, i64 stride, i64 rows, i64 columns,
                                  Element* held, Element* target) {
    __shared__ __align__(1024) char memory[X::BYTES];
    const X tile{memory};
    for (int n = threadIdx.x; n < X::BYTES; n += blockDim.x) memory[n] = char(0xff);
    __syncthreads();
    tile.load<THREADS, ALIGNMENT_BYTES>(source, stride, int(rows), int(columns));
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    for (int n = threadIdx.x; n < BLOCK_Q * HEAD_DIM; n += blockDim.x)
        held[n] = tile.element(X::at(n / HEAD_DIM, n % HEAD_DIM));
    tile.store<THREADS, ALIGNMENT_BYTES>(target, stride, int(rows), int(columns));
}

extern "C" __global__ void copied_row(const Accum* source, Accum* held) {
    __shared__ __align__(16) Accum row[BLOCK_Q];
    copy_row<THREADS>(row, source);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    for (int n = threadIdx.x; n < BLOCK_Q; n += blockDim.x) held[n] = row[n];
}
