// Layer 3. What a block of threads of a persistent kernel does in its turns, and what it keeps in
// shared memory: tiles in rings of stages, and the barriers that say what is in them.
#pragma once

#include "blocks.cuh"
#include "product_sm90.cuh"

constexpr int GROUP = 4 * WARP;      // threads of a warpgroup
constexpr int GROUPS = WARPS_M / 4;  // warpgroups that multiply
constexpr int GROUP_ROWS = 64;       // queries of each
static_assert(BLOCK_Q == GROUP_ROWS * GROUPS && WARPS_N == 1, "a warpgroup takes 64 queries");
static_assert(STAGES >= 2, "values are looked at while those before them are multiplied");
static_assert(LOADERS == 4, "the warp that copies gives the registers of a warpgroup back");

using QueryTile = BoxTile<GROUP_ROWS, HEAD_DIM>;  // of one warpgroup
using KeyTile = BoxTile<BLOCK_K, HEAD_DIM>;
using ValueTile = BoxTile<BLOCK_K, VALUE_DIM>;

constexpr int PAIR_BYTES = KeyTile::BYTES + ValueTile::BYTES;
constexpr int ROOM = 225 * 1024;  // of dynamic shared memory
// Of queries, for the warpgroups in turns: those of the next work, too, as far as there is room.
constexpr int LEFT = (ROOM - STAGES * PAIR_BYTES) / QueryTile::BYTES;
constexpr int Q_STAGES = LEFT < 2 * GROUPS ? LEFT : 2 * GROUPS;
static_assert(Q_STAGES >= GROUPS, "every warpgroup has its queries");
static_assert((BLOCK_Q - GROUP_ROWS + BLOCK_K - 1) / BLOCK_K < STAGES,
              "a warpgroup hears of the next work before it skips what is left of this one");

constexpr int TURNS = 1024;  // of which it is remembered, of each by itself, what was found

// The tiles of keys that some queries see: first to past - 1. All of them see the whole of those
// from full to full_past - 1.
struct Tiles {
    int first, past, full, full_past;

    __device__ bool boundary(int tile) const { return tile < full || tile >= full_past; }
};

// A block of queries of one head, or a warpgroup's part of it, and the tiles that it visits. Under a
// block mask the first and the one past the last are places in a list, the same for all warpgroups.
struct Work {
    int b, h, q0, turn;
    int first, past;  // of the whole block
    Tiles tiles;
    bool safe;   // of a safe sweep
    bool large;  // of the third sweep, in which all rows are large
    bool end;    // of the first sweep or the safe ones, of which this is no work
};

__device__ inline Tiles tiles_of(const Params& p, int b, int q0, int rows) {
    const Band band(p, b);
    const Range keys = band.keys_of(q0, min(q0 + rows, int(p.Nq)));
    const Range full = band.tiles_seen_by_all(q0, q0 + rows);
    return {keys.lo / BLOCK_K, (keys.hi + BLOCK_K - 1) / BLOCK_K, full.lo, full.hi};
}

// The tiles of which a block mask hides not all from a block of queries, ascending: twice the number
// of each, and one more where it hides some. What is behind the last is more than all of them.
struct Listed {
    const int* tiles;

    __device__ Listed(const Params& p, const Work& work)
        : tiles(p.visits + work.b * p.visits_at.b + work.h * p.visits_at.h +
                work.q0 / BLOCK_Q * p.visits_at.i) {}

    // Place of the first one from a tile on.
    __device__ int place(int tile) const {
        int lo = 0;
        for (int hi = tile; lo < hi;) {
            const int middle = (lo + hi) / 2;
            if (tiles[middle] < 2 * tile)
                lo = middle + 1;
            else
                hi = middle;
        }
        return lo;
    }
};

// The work of a turn, with its marks as they are; false where there is none any more.
__device__ inline bool find_work(const Params& p, int turn, Work& work) {
    const int blocks = int((p.Nq + BLOCK_Q - 1) / BLOCK_Q), heads = int(p.B * p.Hq);
    int index = turn * int(gridDim.x) + int(blockIdx.x);
    if (p.schedule) index = p.schedule[index];
    if (index >= blocks * heads) return false;
    const Turn at(blocks, heads, int(p.parts), index);
    work.b = at.head / int(p.Hq), work.h = at.head % int(p.Hq), work.turn = turn;
    // Under a causal mask the last queries see most: they go first.
    work.q0 = (p.right < 0 ? at.block : blocks - 1 - at.block) * BLOCK_Q;
    work.tiles = tiles_of(p, work.b, work.q0, BLOCK_Q);
    work.first = work.tiles.first, work.past = work.tiles.past;
    if constexpr (HAS_BLOCK_MASK) {
        const Listed listed(p, work);
        work.first = listed.place(work.first), work.past = listed.place(work.past);
    }
    return true;
}

struct Shared {
    // What a warpgroup is told fills a stage, but it hears of it by two barriers of its own: one
    // that others wait for as well could be a whole ring ahead.
    u64 q_full[2 * GROUPS], q_empty[Q_STAGES];
    u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u64 swept;
    Work works[Q_STAGES];
    struct {
        u32 count, turns[TURNS / 32];
    } unfinished[2];  // in the first sweep, in the second
};

static_assert(sizeof(Shared) <= 2048, "what tiles leave of shared memory");

struct Memory {
    u32 tiles;
    Shared& shared;

    static_assert(Q_STAGES * QueryTile::BYTES + STAGES * PAIR_BYTES == SHARED_BYTES,
                  "what a launch brings");

    __device__ QueryTile q(int stage) const { return {tiles + stage * QueryTile::BYTES}; }
    __device__ KeyTile k(int stage) const {
        return {tiles + Q_STAGES * QueryTile::BYTES + stage * PAIR_BYTES};
    }
    __device__ ValueTile v(int stage) const { return {k(stage).address + KeyTile::BYTES}; }

    __device__ Barrier q_full(int group, int turn) const {
        return {shared_address(shared.q_full + 2 * group + turn)};
    }
    __device__ Barrier q_empty(int stage) const { return {shared_address(shared.q_empty + stage)}; }
    __device__ Barrier k_full(int stage) const { return {shared_address(shared.k_full + stage)}; }
    __device__ Barrier k_empty(int stage) const { return {shared_address(shared.k_empty + stage)}; }
    __device__ Barrier v_full(int stage) const { return {shared_address(shared.v_full + stage)}; }
    __device__ Barrier v_empty(int stage) const { return {shared_address(shared.v_empty + stage)}; }
    __device__ Barrier swept() const { return {shared_address(&shared.swept)}; }

    // Whether a sweep left a turn unfinished, or one that shares its bit; whether any, or many.
    __device__ bool unfinished(int sweep, int turn) const {
        return shared.unfinished[sweep].turns[turn % TURNS / 32] >> turn % 32 & 1;
    }
    __device__ bool any_unfinished(int sweep) const { return count(sweep) > 0; }
    __device__ bool many_unfinished(int sweep) const { return count(sweep) > 1; }
    __device__ u32 count(int sweep) const {
        return *static_cast<volatile u32*>(&shared.unfinished[sweep].count);
    }
    __device__ void leave_unfinished(int sweep, int turn) const {
        const u32 bit = 1u << turn % 32;
        auto& left = shared.unfinished[sweep];
        if (!(atomicOr(left.turns + turn % TURNS / 32, bit) & bit)) atomicAdd(&left.count, 1);
    }

    // By one thread, before all others.
    __device__ void start() const {
        for (int g = 0; g < GROUPS; ++g) q_full(g, 0).init(1), q_full(g, 1).init(1);
        for (int s = 0; s < Q_STAGES; ++s) q_empty(s).init(GROUP);
        for (int s = 0; s < STAGES; ++s) {
            k_full(s).init(1), k_empty(s).init(GROUPS);
            v_full(s).init(1), v_empty(s).init(GROUPS);
        }
        swept().init(GROUPS);
        for (auto& left : shared.unfinished) {
            left.count = 0;
            for (u32& bits : left.turns) bits = 0;
        }
        barriers_are_made();
    }
};
