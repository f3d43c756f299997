// Layer 3. Shared memory of Hopper's kernel for dQ of wide heads: the queries and dO of each warpgroup, a
// circular buffer of keys and values, and their barriers.
#pragma once

#include "pair_sm90.cuh"
#include "planes.cuh"
#include "tile_scheduler_sm90.cuh"
#include "warpgroups_sm90.cuh"

static_assert(BLOCK_Q == WARPGROUP_ROWS * CONSUMERS && WARPS_N == 1, "64 queries a warpgroup");
static_assert(STAGES >= 3, "the next k is read before this one is released");

using WorkTile = FwdWorkTile;
using QueryTile = SmemTile<WARPGROUP_ROWS, tile_columns(HEAD_COLUMNS)>;  // of one warpgroup
using DoutTile = SmemTile<WARPGROUP_ROWS, tile_columns(VALUE_COLUMNS)>;
using KeyTile = SmemTile<BLOCK_K, tile_columns(HEAD_COLUMNS)>;
using ValueTile = SmemTile<BLOCK_K, tile_columns(VALUE_COLUMNS)>;

// A tile of keys, as the producer tells consumers. Only the producer evaluates the mask by tiles.
struct StagedTile {
    int bits;

    __device__ static StagedTile of(TileEntry entry, bool is_last) {
        return {4 * entry.tile() + 2 * is_last + entry.bits % 2};
    }
    __device__ int tile() const { return bits / 4; }
    __device__ int is_last() const { return bits & 2; }
    __device__ int is_partial() const { return bits & 1; }
};

// Layout of dynamic shared memory: queries and dO of each warpgroup, then the stages. In paired CTAs a tile
// for each warpgroup follows, where parts of dP arrive, then parts of S, then dS.
constexpr int STAGE_BYTES = KeyTile::BYTES > ValueTile::BYTES ? KeyTile::BYTES : ValueTile::BYTES;
constexpr int ROWS_BYTES = QueryTile::BYTES + DoutTile::BYTES;
constexpr int EXCHANGE_BYTES = PAIR ? WARPGROUP_ROWS * BLOCK_K * 4 / SHARES : 0;
static_assert(CONSUMERS * (ROWS_BYTES + EXCHANGE_BYTES) + STAGES * STAGE_BYTES == SHARED_BYTES,
              "what a launch brings");

// Static shared memory.
struct SharedStorage {
    u64 q_full[CONSUMERS], q_empty[CONSUMERS], full[STAGES], empty[STAGES];
    WorkTile work_tiles[CONSUMERS];
    StagedTile tiles[STAGES];  // if masks leave out tiles, the tile of each stage of v
    Exchange::Barriers exchanges[CONSUMERS];
    PairClaims::Shared claims;
};

struct Smem {
    u32 tensors;  // address of dynamic shared memory
    SharedStorage& storage;

    __device__ QueryTile q(int warpgroup) const { return {tensors + warpgroup * ROWS_BYTES}; }
    __device__ DoutTile dout(int warpgroup) const {
        return {q(warpgroup).address + QueryTile::BYTES};
    }
    __device__ u32 stage(int stage) const {
        return tensors + CONSUMERS * ROWS_BYTES + stage * STAGE_BYTES;
    }
    __device__ u32 exchange(int warpgroup) const {
        return stage(STAGES) + warpgroup * EXCHANGE_BYTES;
    }
    __device__ KeyTile k(int at) const { return {stage(at)}; }
    __device__ ValueTile v(int at) const { return {stage(at)}; }

    __device__ Barrier q_full(int warpgroup) const {
        return {shared_address(storage.q_full + warpgroup)};
    }
    __device__ Barrier q_empty(int warpgroup) const {
        return {shared_address(storage.q_empty + warpgroup)};
    }
    __device__ Barrier full(int stage) const { return {shared_address(storage.full + stage)}; }
    __device__ Barrier empty(int stage) const { return {shared_address(storage.empty + stage)}; }

    // One thread initialises the barriers. A q_full gets three arrivals: q, dO and the work tile.
    __device__ void init() const {
        for (int g = 0; g < CONSUMERS; ++g) q_full(g).init(3), q_empty(g).init(WARPGROUP);
        // Threads that have read the tile of a stage release it, or one for each warpgroup.
        constexpr int READERS = SPLIT_FLOATS && HAS_TILE_LIST ? CONSUMERS * WARPGROUP : CONSUMERS;
        for (int s = 0; s < STAGES; ++s) full(s).init(1), empty(s).init(READERS);
        if constexpr (PAIR) {
            for (int g = 0; g < CONSUMERS; ++g) storage.exchanges[g].init();
            storage.claims.init();
        }
        fence_barrier_init();
    }
};
