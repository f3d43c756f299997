// Layer 3. The block of a CTA, and the tiles of a block.
#pragma once

#include "mask.cuh"

// The block and head of a linear index, for `blocks` blocks of each of `heads` heads. L2 swizzle: the heads
// are divided into `groups` groups, whose operands share the L2 cache. In a group the first blocks of all
// heads come first, then the second ones: if the first are the longest, short ones fill the end. The first
// groups may have one head more than the others.
struct BlockCoord {
    int block, head;

    __device__ BlockCoord(int block, int head) : block(block), head(head) {}
    __device__ BlockCoord(int blocks, int heads, int groups)
        : BlockCoord(blocks, heads, groups, work_index()) {}
    template <class Int>
    __device__ BlockCoord(Int blocks, Int heads, Int groups, Int index) {
        const Int size = heads / groups, longer = heads % groups * (size + 1);
        const Int straight = index / blocks;  // the head without groups
        const Int members = straight < longer ? size + 1 : size;
        const Int start = straight < longer ? 0 : longer;
        const Int first = start + (straight - start) / members * members;
        const Int within = index - first * blocks;
        block = within / members;
        head = first + within % members;
    }
};

// The tiles of a block that are not empty, ascending: index and kind. All threads of the CTA call.
template <class KindOf>
struct TileIterator {
    KindOf kind_of;
    int tile, end, kind;

    __device__ TileIterator(int begin, int end, KindOf kind_of)
        : kind_of(kind_of), tile(begin - 1), end(end), kind(EMPTY) {
        next();
    }
    __device__ bool done() const { return tile >= end; }

    __device__ void next() {
        if constexpr (HAS_BLOCK_MASK || HAS_MASK_MOD) {
            // Most tiles of a sparse mask are empty: each thread tests one tile at a time.
            while (++tile < end) {
                const int mine = tile + int(threadIdx.x);
                const int own = mine < end ? kind_of(mine) : EMPTY;
                // One maximum finds the nearest tile and its kind: the distance is above the kind's two
                // bits.
                const int ahead = own == EMPTY ? 0 : (THREADS - int(threadIdx.x)) * 4 + own;
                const int best = block_maximum(ahead);
                if (best) {
                    tile += THREADS - best / 4;
                    kind = best % 4;
                    return;
                }
                tile += THREADS - 1;
            }
            tile = end;
        } else {
            if (++tile < end) kind = kind_of(tile);
        }
    }

    __device__ static int block_maximum(int x) {
        __shared__ int warps[WARPS_M * WARPS_N];
#pragma unroll
        for (int step = 16; step; step /= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
        __syncthreads();  // the previous maximum has been read
        if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = x;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < WARPS_M * WARPS_N; ++w) x = max(x, warps[w]);
        return x;
    }
};

template <class KindOf>
__device__ TileIterator(int, int, KindOf) -> TileIterator<KindOf>;
