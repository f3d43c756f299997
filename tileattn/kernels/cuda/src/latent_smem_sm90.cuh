// Layer 3. Shared memory of Hopper's latent-attention kernel: queries, two stages of keys, P, and their
// barriers. Values are the first columns of the keys.
#pragma once

#include "gemm_sm90.cuh"
#include "nonfinite.cuh"
#include "splits.cuh"
#include "warpgroups_sm90.cuh"

static_assert(BLOCK_Q == 64 && BLOCK_K == 64 && WARPS_M == 4 && WARPS_N == 2 && STAGES == 2);

using QueryTile = SmemTile<BLOCK_Q, HEAD_DIM>;
using KeyTile = SmemTile<BLOCK_K, HEAD_DIM>;
using ProbTile = SmemTile<BLOCK_Q, BLOCK_K>;

// A stage has two parts. Each consumer warpgroup computes half of the columns of O, and releases the part
// that holds these columns. The score warpgroup has the first part, and uses it last, in PV. So the second
// part, which also has the columns past the values, is loaded first, and comes first in QK.
constexpr int HALF = VALUE_DIM / 2, HALF_SLICES = HALF / KeyTile::WIDTH;
enum Part { FIRST = 0, SECOND = 1 };
__device__ constexpr int slices_begin(int part) { return part == FIRST ? 0 : HALF_SLICES; }
__device__ constexpr int slices_end(int part) {
    return part == FIRST ? HALF_SLICES : KeyTile::SLICES;
}

// Layout of dynamic shared memory.
struct Tensors {
    QueryTile::Storage q;
    KeyTile::Storage k[STAGES];
    ProbTile::Storage p;
};
static_assert(int(sizeof(Tensors)) == SHARED_BYTES, "what a launch brings");

// Static shared memory.
struct SharedStorage {
    u64 full[STAGES][2], empty[STAGES][2], p_full, p_empty;
    Accum rescale[BLOCK_Q];      // factors for O from the tile whose P is published
    Accum row_sums[BLOCK_Q][2];  // a RowSum each
    int bad[BLOCK_Q];            // 1 if an output of the row is not finite
};
static_assert(sizeof(SharedStorage) <= 2048, "what the tensors leave");

struct Smem {
    u32 tensors;  // address of the dynamic part
    SharedStorage& storage;

    __device__ QueryTile q() const { return {tensors}; }
    __device__ KeyTile k(int stage) const {
        return {tensors + QueryTile::BYTES + stage * KeyTile::BYTES};
    }
    __device__ ProbTile p() const {
        return {tensors + QueryTile::BYTES + STAGES * KeyTile::BYTES};
    }
    __device__ Barrier full(int stage, int part) const {
        return {shared_address(storage.full[stage] + part)};
    }
    __device__ Barrier empty(int stage, int part) const {
        return {shared_address(storage.empty[stage] + part)};
    }
    __device__ Barrier p_full() const { return {shared_address(&storage.p_full)}; }
    __device__ Barrier p_empty() const { return {shared_address(&storage.p_empty)}; }

    // One thread initialises the barriers.
    __device__ void init() const {
        for (int s = 0; s < STAGES; ++s)
            for (int part = 0; part < 2; ++part) full(s, part).init(1), empty(s, part).init(4);
        p_full().init(WARPGROUP), p_empty().init(4);
        fence_barrier_init();
    }
};

// A warp releases a stage. Its part of the GEMMs that read the stage is complete.
__device__ inline void release(const Barrier& empty) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) empty.arrive();
}
