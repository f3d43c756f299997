// Layer 3. What a block of threads of the backward pass does in its turns, and what it keeps in
// shared memory: the keys and values of a turn, the queries and gradients of the output in rings,
// and what the warpgroups tell each other.
#pragma once

#include "blocks.cuh"
#include "product_sm90.cuh"

constexpr int GROUP = 4 * WARP;      // threads of a warpgroup
constexpr int GROUPS = WARPS_M / 4;  // warpgroups that multiply
constexpr int GROUP_ROWS = 64;       // keys of each; where heads are wide, all take the same
static_assert(DQ_ROWS == GROUP_ROWS, "a warpgroup's share of dq is added by one thread");
static_assert(BLOCK_K == GROUP_ROWS * (IS_WIDE ? 1 : GROUPS) && WARPS_N == 1,
              "a warpgroup takes 64 keys");
static_assert(LOADERS == 4, "the warps that copy give the registers of a warpgroup back");

// Queries stay until dk has them, while the next probabilities are found: they need a stage more,
// and are the last to need two.
constexpr int OUT_STAGES = STAGES, Q_STAGES = !IS_WIDE ? STAGES + 1 : REPAIRS ? 1 : 2;
constexpr int PAIR_STAGES = 2;  // so that no warpgroup waits for the products of the other
constexpr int SUM_STAGES = IS_WIDE ? 2 : 3;  // pieces of dq on their way to each who adds them

// Each warpgroup computes a part of dq: 64 queries, and all columns or as many as are its share.
constexpr int DQ_COLUMNS = HEAD_DIM * BLOCK_Q / (GROUP_ROWS * GROUPS);
constexpr int DQ_SHARES = HEAD_DIM / DQ_COLUMNS;
static_assert(IS_WIDE || DQ_COLUMNS % 64 == 0 || DQ_COLUMNS == 32, "shares keep to slices");

using KeyTile = BoxTile<BLOCK_K, HEAD_DIM>;
using ValueTile = BoxTile<BLOCK_K, VALUE_DIM>;
using QueryTile = BoxTile<BLOCK_Q, HEAD_DIM>;
using OutTile = BoxTile<BLOCK_Q, VALUE_DIM>;
using PairTile = BoxTile<BLOCK_Q, BLOCK_K>;  // a query's gradients at the scores

constexpr int ROW_BYTES = BLOCK_Q * 4;  // of a number for each query

// The tiles of queries that some keys see: first to past - 1. All of them are seen by all keys from
// full to full_past - 1.
struct Tiles {
    int first, past, full, full_past;

    __device__ bool boundary(int tile) const { return tile < full || tile >= full_past; }
};

// A block of keys of one head, and the tiles of queries that each of the query heads visits.
struct Work {
    int b, kv, k0;
    bool end;  // there is no work any more
    Tiles tiles;
};

// The next work that nobody has claimed: long ones come first, and those of a head in order of its
// keys. So whoever has claimed before all others that are at work waits for none of them. By lane 0,
// and shuffled, as the compiler is to know that it is the same in all lanes that take part.
__device__ inline u32 claim(const Params& p) {
    return __shfl_sync(1, atomicAdd(p.claimed + (REPAIRS ? 1 : 0), 1), 0);
}

// The work of an index; false where there is none any more.
__device__ __forceinline__ bool find_work(const Params& p, u32 index, Work& work) {
    const int blocks = int((p.Nk + BLOCK_K - 1) / BLOCK_K), heads = int(p.B * p.Hkv);
    if (index >= u32(blocks * heads)) return false;
    const Turn at(blocks, heads, int(p.parts), int(index));
    work.b = at.head / int(p.Hkv), work.kv = at.head % int(p.Hkv), work.k0 = at.block * BLOCK_K;
    const Band band(p, work.b);
    const Range some = band.queries_of(work.k0, work.k0 + BLOCK_K);
    const Range all = band.tiles_that_see_all(work.k0, work.k0 + BLOCK_K);
    work.tiles = {some.lo / BLOCK_Q, (some.hi + BLOCK_Q - 1) / BLOCK_Q, all.lo, all.hi};
    return true;
}

struct Shared {
    u64 k_full, k_empty, v_full, v_empty;
    u64 weights_full, pairs_full[PAIR_STAGES], pairs_empty[PAIR_STAGES];
    u64 sums_full[ADDERS][SUM_STAGES], sums_empty[ADDERS][SUM_STAGES];
    u64 q_full[Q_STAGES], q_empty[Q_STAGES], out_full[OUT_STAGES], out_empty[OUT_STAGES];
    alignas(16) float shifts[Q_STAGES][BLOCK_Q];
    alignas(16) float deltas[OUT_STAGES][BLOCK_Q];
    Work work;
    u32 found[WARPS_M];  // by each warp, of what is not finite
};

struct Memory {
    u32 tiles;
    Shared& shared;

    static constexpr int V = KeyTile::BYTES, Q = V + ValueTile::BYTES;
    static constexpr int OUT = Q + Q_STAGES * QueryTile::BYTES;
    static constexpr int PAIRS = OUT + OUT_STAGES * OutTile::BYTES;
    static constexpr int SUMS = PAIRS + PAIR_STAGES * PairTile::BYTES;
    // Pieces of dq; and where heads are wide, the probabilities that a warpgroup tells the other.
    static constexpr int PIECE = DQ_ROWS * DQ_PIECE * 4;
    static constexpr int WEIGHTS = SUMS + ADDERS * SUM_STAGES * PIECE;
    // To repair, the keys once more, where zero takes the place of what is not finite.
    static constexpr int CLEAN_K = WEIGHTS + (IS_WIDE ? BLOCK_Q * BLOCK_K * 4 : 0);
    static constexpr int BYTES = CLEAN_K + (REPAIRS ? KeyTile::BYTES : 0);
    static_assert(BYTES == SHARED_BYTES, "what a launch brings");
    static_assert(BYTES + sizeof(Shared) <= 227 * 1024, "what a block may have");

    // Where the tiles begin. That it is the same each time is hidden from the compiler, which would
    // keep dozens of operands of tiles that stay in registers, and then have none for sums.
    __device__ u32 start_of_tiles() const {
        u32 zero;
        asm volatile("mov.u32 %0, 0;" : "=r"(zero));
        return tiles + zero;
    }

    __device__ KeyTile k() const { return {start_of_tiles()}; }
    __device__ ValueTile v() const { return {start_of_tiles() + V}; }
    __device__ QueryTile q(int stage) const { return {tiles + Q + stage * QueryTile::BYTES}; }
    __device__ OutTile dout(int stage) const { return {tiles + OUT + stage * OutTile::BYTES}; }
    __device__ PairTile ds(int stage) const { return {tiles + PAIRS + stage * PairTile::BYTES}; }
    __device__ u32 sums(int adder, int stage) const {
        return tiles + SUMS + (adder * SUM_STAGES + stage) * PIECE;
    }
    __device__ u32 weights() const { return tiles + WEIGHTS; }
    __device__ KeyTile clean_k() const { return {tiles + CLEAN_K}; }
    // Of each warp, in place of gradients at the scores that its warpgroup finds.
    __device__ u32 staged(int stage) const {
        return ds(stage).address + threadIdx.x / GROUP * PairTile::SLICE +
               threadIdx.x % GROUP / WARP * STAGED_BYTES;
    }

    __device__ Barrier k_full() const { return {shared_address(&shared.k_full)}; }
    __device__ Barrier k_empty() const { return {shared_address(&shared.k_empty)}; }
    __device__ Barrier v_full() const { return {shared_address(&shared.v_full)}; }
    __device__ Barrier v_empty() const { return {shared_address(&shared.v_empty)}; }
    __device__ Barrier weights_full() const { return {shared_address(&shared.weights_full)}; }
    __device__ Barrier pairs_full(int stage) const {
        return {shared_address(shared.pairs_full + stage)};
    }
    __device__ Barrier pairs_empty(int stage) const {
        return {shared_address(shared.pairs_empty + stage)};
    }
    __device__ Barrier sums_full(int adder, int stage) const {
        return {shared_address(shared.sums_full[adder] + stage)};
    }
    __device__ Barrier sums_empty(int adder, int stage) const {
        return {shared_address(shared.sums_empty[adder] + stage)};
    }
    __device__ Barrier q_full(int stage) const { return {shared_address(shared.q_full + stage)}; }
    __device__ Barrier q_empty(int stage) const { return {shared_address(shared.q_empty + stage)}; }
    __device__ Barrier out_full(int stage) const {
        return {shared_address(shared.out_full + stage)};
    }
    __device__ Barrier out_empty(int stage) const {
        return {shared_address(shared.out_empty + stage)};
    }

    // By one thread, before all others: all threads arrive where a warpgroup does. Tiles that come
    // with a number for each row expect twice.
    __device__ void start() const {
        constexpr int ALL = GROUPS * GROUP;
        k_full().init(1), k_empty().init(ALL + ADDERS);  // those who add read the work, too
        v_full().init(1), v_empty().init(IS_WIDE ? GROUP : ALL);
        for (int s = 0; s < Q_STAGES; ++s) q_full(s).init(2), q_empty(s).init(ALL);
        for (int s = 0; s < OUT_STAGES; ++s) out_full(s).init(2), out_empty(s).init(ALL);
        weights_full().init(GROUP);
        for (int s = 0; s < PAIR_STAGES; ++s)
            pairs_full(s).init(IS_WIDE ? GROUP : ALL), pairs_empty(s).init(ALL);
        for (int n = 0; n < ADDERS; ++n)
            for (int s = 0; s < SUM_STAGES; ++s) sums_full(n, s).init(GROUP), sums_empty(n, s).init(1);
        barriers_are_made();
    }
};
