// Layer 3. Shared memory of Hopper's backward kernels: k and v of a work tile, circular buffers of
// q, dO, dS and dQ, and their barriers.
#pragma once

#include "bias.cuh"
#include "pair_sm90.cuh"
#include "planes.cuh"
#include "tile_scheduler_sm90.cuh"
#include "warpgroups_sm90.cuh"

// Wide heads: both warpgroups have the same 64 keys.
constexpr bool IS_WIDE = BLOCK_K == WARPGROUP_ROWS;
static_assert(BLOCK_K == WARPGROUP_ROWS * (IS_WIDE ? 1 : CONSUMERS) && WARPS_N == 1,
              "64 keys a warpgroup");

constexpr bool NAN_SAFE = ONLY_FLAGGED;  // for heads that the first launch has skipped

// True if a separate warp loads the bias, one tile ahead.
constexpr int QT = BLOCK_Q / 8 / SHARES;  // atoms of the scores that a CTA finishes
template <bool>
struct TileBiasOf {
    using Type = WarpBias<true, 1, QT>;
};
template <>
struct TileBiasOf<true> {
    using Type = HeldBias<true, QT>;
};
using TileBias = TileBiasOf<SPLIT_FLOATS>::Type;
constexpr bool BIAS_IS_LOADED = HAS_BIAS && TileBias::STAGED;

// True if dK and dV leave registers only for half of dP of a tile, and none for the next tile.
constexpr bool IN_HALVES = !IS_WIDE && HEAD_DIM > 128;

// True if the GEMMs of dQ, dV and dP are issued together, and dQ is staged while dV and dP run. Then P has
// registers only as the operand of dV, and dK must be complete before.
constexpr bool DQ_BESIDE_DP = !IS_WIDE && STAGES > 2;

// q is held until dK has read it, while the next P is computed. So it has one stage more than dO if shared
// memory suffices.
constexpr int DOUT_STAGES = DQ_BESIDE_DP ? STAGES - 1 : STAGES,
              Q_STAGES = IS_WIDE || IN_HALVES || (DQ_IS_TRANSPOSED && NAN_SAFE) ? STAGES : STAGES + 1;
// With two stages no warpgroup waits for the GEMMs of the other. The NaN-safe path stores a table in one.
constexpr int DS_STAGES = DQ_BESIDE_DP || ((IN_HALVES || DQ_IS_TRANSPOSED) && !NAN_SAFE) ? 1 : 2;
// Stages for each warpgroup's part of dQ. A transposed stage holds the whole part.
constexpr int DQ_STAGES = DQ_IS_TRANSPOSED || (IN_HALVES && NAN_SAFE) ? 1 : BIAS_IS_LOADED ? 2 : 3;
// Wide heads: stages for P, which the dV warpgroup passes to the dK warpgroup. Paired CTAs have one for their
// half, where parts of S arrive before, and as much for parts of dP, then for dS. Half as much is for P.
constexpr int P_STAGES = PAIR ? 1 : 2;
static_assert(!PAIR || IS_WIDE, "only wide heads have half of the columns in each CTA");

// A warpgroup's part of a dQ tile: 64 queries or all, and some columns.
struct DqShare {
    int row, column, second;  // the first 64 columns begin at `column`, the others at `second`

    __device__ constexpr int at(int n) const { return n < 64 ? column + n : second + n - 64; }
};
constexpr int DQ_SHARES = WARPGROUP_ROWS * CONSUMERS / BLOCK_Q;  // warpgroups with the same queries
constexpr int DQ_COLUMNS = DQ_IS_TRANSPOSED ? BLOCK_Q : (DQ_DIM / DQ_SHARES + 31) / 32 * 32;
// Bulk copies of a warpgroup's part, each from one stage.
constexpr int DQ_COPIES = DQ_IS_TRANSPOSED ? 1 : DQ_COLUMNS / DQ_COPY_COLUMNS;
// The dQ store warps alternate by tiles, so that one adds while the other waits. If a part has more copies
// than there are stages, parities could not tell which warp a stage belongs to: one warp stores all tiles.
constexpr int DQ_STORE_WARPS = DQ_COPIES > DQ_STAGES ? 1 : 2;
static_assert(IS_WIDE || !DQ_IS_TRANSPOSED || (DQ_DIM > WARPGROUP_ROWS && CONSUMERS == 2), "64 columns a warpgroup");
static_assert(IS_WIDE || IN_HALVES || DQ_IS_TRANSPOSED || DQ_COLUMNS % 64 == 0 || DQ_COLUMNS == 32,
              "shares keep to slices");

__device__ constexpr DqShare dq_share(int warpgroup) {
    if constexpr (DQ_IS_TRANSPOSED)
        return {0, DQ_COPY_COLUMNS * warpgroup, 0};
    if constexpr (IN_HALVES)  // a slice each, and half of the last one
        return {0, 64 * warpgroup, 128 + 32 * warpgroup};
    const int column = warpgroup % DQ_SHARES * DQ_COLUMNS;
    return {warpgroup / DQ_SHARES * DQ_ROWS, column, column + 64};
}

using WorkTile = BwdWorkTile;
using KeyTile = SmemTile<BLOCK_K, tile_columns(HEAD_COLUMNS)>;
using ValueTile = SmemTile<BLOCK_K, tile_columns(VALUE_COLUMNS)>;
using QueryTile = SmemTile<BLOCK_Q, tile_columns(HEAD_COLUMNS)>;
using DoutTile = SmemTile<BLOCK_Q, tile_columns(VALUE_COLUMNS)>;
using ScoreTile = SmemTile<BLOCK_Q, BLOCK_K>;  // dS, queries in rows

// Layout of dynamic shared memory: the offset of each part. Parts that only some kernels have follow. Wide
// heads have P instead of dS and dQ.
struct Tensors {
    static constexpr int DS_BYTES = IS_WIDE ? 0 : DS_STAGES * ScoreTile::BYTES;
    static constexpr int DQ_TILE = DQ_ROWS * DQ_COPY_COLUMNS * 4;
    static constexpr int DQ_BYTES = IS_WIDE ? 0 : CONSUMERS * DQ_STAGES * DQ_TILE;
    static constexpr int P_TILE = BLOCK_Q * BLOCK_K * 4 / SHARES;
    static constexpr int P_BYTES = !IS_WIDE ? 0 : PAIR ? P_TILE * 5 / 2 : P_STAGES * P_TILE;

    static constexpr int V = KeyTile::BYTES, Q = V + ValueTile::BYTES;
    static constexpr int DOUT = Q + Q_STAGES * QueryTile::BYTES;
    static constexpr int DS = DOUT + DOUT_STAGES * DoutTile::BYTES, DQ = DS + DS_BYTES;
    static constexpr int P = DQ + DQ_BYTES, BYTES = P + P_BYTES;
};
// NaN-safe: a copy of k with zeros instead of values that are not finite.
constexpr int CLEAN_K_BYTES = NAN_SAFE ? KeyTile::BYTES : 0;
constexpr int BIAS_BYTES = TileBias::BYTES;
static_assert(!(BIAS_IS_LOADED && (IS_WIDE || NAN_SAFE)), "there is no room for the bias");
static_assert(!(IS_WIDE && NAN_SAFE), "generic kernels are for those heads");
static_assert(Tensors::BYTES + CLEAN_K_BYTES + BIAS_BYTES == SHARED_BYTES, "what a launch brings");

// Static shared memory.
struct SharedStorage {
    u64 k_full, k_empty, v_full, v_empty;
    u64 bias_full, bias_empty;
    u64 p_full[P_STAGES], p_empty[P_STAGES];
    Exchange::Barriers s_exchange, p_exchange, dp_exchange;
    PairClaims::Shared claims;
    u64 ds_full[DS_STAGES], ds_empty[DS_STAGES];
    u64 dq_full[CONSUMERS][DQ_STAGES], dq_empty[CONSUMERS][DQ_STAGES];
    u64 q_full[Q_STAGES], q_empty[Q_STAGES], dout_full[DOUT_STAGES], dout_empty[DOUT_STAGES];
    alignas(16) float lse_log2[Q_STAGES][BLOCK_Q];
    alignas(16) float delta[DOUT_STAGES][BLOCK_Q];
    WorkTile work_tile;
    u32 found[WARPS_M];  // by each warp, whether a tile has something that is not finite
};
static_assert(SHARED_BYTES + sizeof(SharedStorage) <= 227 * 1024, "what a CTA may have");

struct Smem {
    char* memory;
    u32 tensors;  // its address
    SharedStorage& storage;

    // An address that seems to differ at each call. Otherwise the compiler would keep dozens of
    // descriptors of k and v in registers, and leave none for accumulators.
    __device__ u32 opaque_tensors() const {
        const u32 zero = opaque_zero();
        return tensors + zero;
    }

    __device__ KeyTile k() const { return {opaque_tensors()}; }
    __device__ ValueTile v() const { return {opaque_tensors() + Tensors::V}; }
    __device__ QueryTile q(int stage) const {
        return {tensors + Tensors::Q + stage * QueryTile::BYTES};
    }
    __device__ DoutTile dout(int stage) const {
        return {tensors + Tensors::DOUT + stage * DoutTile::BYTES};
    }
    __device__ ScoreTile ds(int stage) const {
        return {tensors + Tensors::DS + stage * ScoreTile::BYTES};
    }
    __device__ u32 dq(int warpgroup, int stage) const {
        return tensors + Tensors::DQ + (warpgroup * DQ_STAGES + stage) * Tensors::DQ_TILE;
    }
    __device__ u32 p(int stage) const { return tensors + Tensors::P + stage * Tensors::P_TILE; }
    __device__ u32 peer_dp() const { return p(1); }
    __device__ u32 peer_p() const { return p(2); }
    __device__ KeyTile clean_k() const { return {tensors + Tensors::BYTES}; }
    __device__ char* bias() const { return memory + Tensors::BYTES; }
    // Staging memory of each warp, in the slice of dS that its warpgroup writes.
    __device__ u32 staging(int stage) const {
        return ds(stage).address + threadIdx.x / WARPGROUP * ScoreTile::SLICE +
               threadIdx.x % WARPGROUP / WARP * STAGING_BYTES;
    }

    __device__ Barrier k_full() const { return {shared_address(&storage.k_full)}; }
    __device__ Barrier k_empty() const { return {shared_address(&storage.k_empty)}; }
    __device__ Barrier v_full() const { return {shared_address(&storage.v_full)}; }
    __device__ Barrier v_empty() const { return {shared_address(&storage.v_empty)}; }
    __device__ Barrier bias_full() const { return {shared_address(&storage.bias_full)}; }
    __device__ Barrier bias_empty() const { return {shared_address(&storage.bias_empty)}; }
    __device__ Barrier p_full(int stage) const { return {shared_address(storage.p_full + stage)}; }
    __device__ Barrier p_empty(int stage) const {
        return {shared_address(storage.p_empty + stage)};
    }
    __device__ Barrier ds_full(int stage) const {
        return {shared_address(storage.ds_full + stage)};
    }
    __device__ Barrier ds_empty(int stage) const {
        return {shared_address(storage.ds_empty + stage)};
    }
    __device__ Barrier dq_full(int warpgroup, int stage) const {
        return {shared_address(storage.dq_full[warpgroup] + stage)};
    }
    __device__ Barrier dq_empty(int warpgroup, int stage) const {
        return {shared_address(storage.dq_empty[warpgroup] + stage)};
    }
    __device__ Barrier q_full(int stage) const { return {shared_address(storage.q_full + stage)}; }
    __device__ Barrier q_empty(int stage) const {
        return {shared_address(storage.q_empty + stage)};
    }
    __device__ Barrier dout_full(int stage) const {
        return {shared_address(storage.dout_full + stage)};
    }
    __device__ Barrier dout_empty(int stage) const {
        return {shared_address(storage.dout_empty + stage)};
    }

    // One thread initialises the barriers. All threads of a consumer warpgroup arrive. The full barriers of
    // q and dO get two arrivals: the tile, and its lse or delta. k_full gets two: k, and the work tile.
    __device__ void init() const {
        constexpr int ALL = CONSUMER_THREADS, ONE_OR_ALL = IS_WIDE ? WARPGROUP : ALL;
        // The dQ store threads and the warp that loads the bias read the work tile, too.
        constexpr int OTHERS = IS_WIDE ? 0 : DQ_STORE_WARPS + BIAS_IS_LOADED * WARP;
        k_full().init(2), k_empty().init(ALL + OTHERS);
        bias_full().init(WARP), bias_empty().init(ALL);
        v_full().init(1), v_empty().init(ONE_OR_ALL);
        for (int s = 0; s < Q_STAGES; ++s) q_full(s).init(2), q_empty(s).init(ALL);
        for (int s = 0; s < DOUT_STAGES; ++s) dout_full(s).init(2), dout_empty(s).init(ALL);
        for (int s = 0; s < P_STAGES; ++s) p_full(s).init(WARPGROUP), p_empty(s).init(WARPGROUP);
        if constexpr (PAIR)
            storage.s_exchange.init(), storage.p_exchange.init(), storage.dp_exchange.init(),
                storage.claims.init();
        for (int s = 0; s < DS_STAGES; ++s) ds_full(s).init(ALL), ds_empty(s).init(ALL);
        for (int n = 0; n < CONSUMERS; ++n)
            for (int s = 0; s < DQ_STAGES; ++s)
                dq_full(n, s).init(WARPGROUP), dq_empty(n, s).init(1);
        fence_barrier_init();
    }
};
