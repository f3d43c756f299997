// Layer 3. Shared memory of Hopper's forward kernel: circular buffers of q, k and v, and their
// barriers. Each group of a CTA has its own.
#pragma once

#include "bias.cuh"
#include "gemm_sm90.cuh"
#include "planes.cuh"
#include "tile_scheduler_sm90.cuh"
#include "warpgroups_sm90.cuh"

constexpr int ROWS = BLOCK_Q / CONSUMERS;  // queries of a warpgroup
constexpr bool READS_ONCE = ROWS < WARPGROUP_ROWS;  // one block has all rows that share keys
static_assert(BLOCK_Q == ROWS * CONSUMERS && WARPS_N == 1, "the warpgroups share the queries");
static_assert(STAGES >= 2 || SPLIT_FLOATS, "the next k stage is read before the v stage is released");

using WorkTile = WindowedWorkTile;
using QueryTile = SmemTile<ROWS, tile_columns(HEAD_DIM)>;  // of one warpgroup
constexpr int KV_SIZE = int(sizeof(KvElement));  // bytes; a tile has two numbers of 8 bits as one element
__device__ constexpr int kv_columns(int dim) {
    return SPLIT_FLOATS ? tile_columns(dim) : dim * KV_SIZE / 2;
}
using KeyTile = SmemTile<BLOCK_K, kv_columns(HEAD_DIM)>;
using ValueTile = SmemTile<BLOCK_K, kv_columns(VALUE_DIM)>;

struct KeyValueStage {
    KeyTile::Storage k;
    ValueTile::Storage v;
};

// With TOTALS each warp also has memory for the total of its rows (running_total.cuh), as far as it fits. A thread
// has pieces of 16 bytes, in blocks of four. The staging memory of the warps is the first block.
constexpr int TOTAL_PIECES = TOTALS ? VALUE_DIM / 8 + 1 : 0, BLOCK_PIECES = 4;
constexpr int TOTAL_BLOCK = WARPS_M * STAGING_BYTES;
static_assert(STAGING_BYTES == BLOCK_PIECES * WARP * 16, "a block is the staging memory of all warps");

// Each warp has staging memory for its output, unless a bias leaves no space. A q stage holds the queries
// of one warpgroup. There are stages for the next work tile, too, as far as they fit, and after them more blocks.
//
// With SPLIT_KV successive work tiles mostly have the same queries, so each warpgroup has one tile of them, and
// output is not staged. In forward_decode_sm90 the space holds P, and at the end of a piece one row for each warp,
// which sum_row recomputes.
//
// For float32 the warpgroups load and split their queries themselves.
constexpr int BIAS_BYTES = WarpBias<false, 1, BLOCK_K / 8>::BYTES;
constexpr int Q_SPACE =
    225 * 1024 / (GROUPS * MIN_BLOCKS_PER_SM) - BIAS_BYTES - STAGES * int(sizeof(KeyValueStage));
constexpr int OUT_LEAST = Q_SPACE >= CONSUMERS * QueryTile::BYTES + TOTAL_BLOCK;
constexpr int OUT_MOST = TOTALS ? (TOTAL_PIECES + BLOCK_PIECES - 1) / BLOCK_PIECES : OUT_LEAST;
constexpr int OUT_FIT = (Q_SPACE - 2 * CONSUMERS * QueryTile::BYTES) / TOTAL_BLOCK;
constexpr int OUT_BLOCKS = OUT_FIT < OUT_LEAST ? OUT_LEAST : OUT_FIT < OUT_MOST ? OUT_FIT : OUT_MOST;
constexpr int P_BYTES = ROWS * 2 * BLOCK_K, ROW_BYTES = WARPS_M * VALUE_DIM * int(sizeof(Accum));
constexpr int SPLIT_BYTES = ROWS == WARPGROUP_ROWS ? 0 : P_BYTES < ROW_BYTES ? ROW_BYTES : P_BYTES;
constexpr bool LOADS_OWN_Q = SPLIT_KV || SPLIT_FLOATS;
constexpr int OUT_BYTES = SPLIT_KV ? SPLIT_BYTES : LOADS_OWN_Q ? 0 : OUT_BLOCKS * TOTAL_BLOCK;
constexpr bool STAGED_OUT = !LOADS_OWN_Q && OUT_BLOCKS > 0;
constexpr int Q_FIT = (Q_SPACE - OUT_BYTES) / QueryTile::BYTES;
constexpr int Q_STAGES = LOADS_OWN_Q || Q_FIT >= 2 * CONSUMERS ? 2 * CONSUMERS : Q_FIT;
constexpr int Q_TILES = LOADS_OWN_Q ? CONSUMERS : Q_STAGES;
static_assert(Q_STAGES >= CONSUMERS, "a stage for every warpgroup");
static_assert((BLOCK_Q - ROWS + BLOCK_K - 1) / BLOCK_K < STAGES || SPLIT_FLOATS,
              "a warpgroup fetches the next work tile before it skips the rest of this one");

constexpr int TRACKED = 512;  // bits for unfinished work tiles: iterations modulo 512

// Layout of dynamic shared memory: queries, stages, the staging memory of the warps, or P, and the bias.
constexpr int Q_BYTES = Q_TILES * QueryTile::BYTES, TENSOR_BYTES = Q_BYTES + STAGES * int(sizeof(KeyValueStage));
constexpr int GROUP_BYTES = TENSOR_BYTES + OUT_BYTES + BIAS_BYTES;
static_assert(GROUPS * GROUP_BYTES == SHARED_BYTES, "what a launch brings");
static_assert(GROUPS == 1 || GROUP_BYTES % 1024 == 0, "where swizzled tiles may lie");

// A scheduler thread finds the work tiles of packed sequences. Looking up a block takes several dependent
// loads, for which the producer would keep the consumers waiting. With two groups the other group computes.
constexpr bool HAS_SCHEDULER = PACKED && GROUPS == 1 && !SPLIT_KV;

// The warps of the producer warpgroup that copy the rows of paged keys (gather_sm90.cuh). The first warp of a
// group finds work tiles and loads q, and the scheduler thread has a warp of its own.
constexpr int GATHER_WARPS = GATHERED ? PRODUCER_WARPS / GROUPS - 1 - HAS_SCHEDULER : 0;
static_assert(!GATHERED || GATHER_WARPS > 0, "a warp for each group");

// The block-table entry of a TMA box of paged keys, and the first row of the box in its page.
struct BoxPlace {
    u32 entry;
    int row;
};
// Places are kept for the tile of values, the tile of keys after it, and the next one. Boxes have BOX_KEYS or more
// rows. Loads read one place past the last box.
constexpr int BOX_KEYS = 16, PLACE_TILES = 4, TILE_PLACES = BLOCK_K / BOX_KEYS + 1;

// The keys of a work tile, as the producer thread hands them to the gather warps.
struct KeyRequest {
    int b;           // the sequence
    int kv;          // the key head; negative: all passes have ended
    int begin, end;  // key tiles
    int ask_at;      // the tile at which the gather warps ask for the next request
};
struct Mailbox {
    u64 full, empty;
    KeyRequest request;
};

// Static shared memory.
struct SharedStorage {
    // A work tile occupies a q stage, but each warpgroup has two full barriers of its own. On a barrier
    // shared by warpgroups, one could wait a whole turn of the buffer too long.
    u64 q_full[2 * CONSUMERS], q_empty[Q_STAGES];
    u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u64 pass_done;
    u64 found_full, found_empty;
    bool stops;  // the scheduler thread stops
    WorkTile work_tiles[Q_STAGES + HAS_SCHEDULER];  // the last one is what the scheduler thread has found
    struct {
        u32 count, iterations[TRACKED / 32];
    } redo[2];  // after the first pass, after the second
    alignas(Mailbox) char mailbox[GATHERED ? sizeof(Mailbox) : 1];
    BoxPlace places[PAGED && !GATHERED ? PLACE_TILES : 1][PAGED && !GATHERED ? TILE_PLACES : 1];
};
// Dynamic shared memory begins at a multiple of 1024. The system takes 1024 bytes for each CTA.
constexpr int STATIC_BYTES = (GROUPS * int(sizeof(SharedStorage)) + 1023) / 1024 * 1024;
static_assert(MIN_BLOCKS_PER_SM * (SHARED_BYTES + STATIC_BYTES + 1024) <= 228 * 1024, "what an SM has");

// A full barrier of keys or values. The gather warps' cp.async writes through the generic proxy, but wgmma reads
// through the async proxy. The barrier orders the copies before the wait (Barrier::arrive_after_copies), and the
// fence after the wait orders them before wgmma.
struct KeyBarrier : Barrier {
    __device__ void wait(u32 parity) const {
        Barrier::wait(parity);
        if constexpr (GATHERED) fence_async_shared();
    }
};

struct Smem {
    char* memory;
    u32 tensors;  // its address
    SharedStorage& storage;
    int group;

    __device__ Smem(char* tensors, SharedStorage* storages, int group)
        : memory(tensors + group * GROUP_BYTES),
          tensors(shared_address(memory)),
          storage(storages[group]),
          group(group) {}

    __device__ QueryTile q(int stage) const { return {tensors + stage * QueryTile::BYTES}; }
    __device__ KeyTile k(int stage) const {
        return {tensors + Q_BYTES + stage * int(sizeof(KeyValueStage))};
    }
    __device__ ValueTile v(int stage) const { return {k(stage).address + KeyTile::BYTES}; }

    // The places of the boxes of the tile from key k0 on.
    __device__ BoxPlace* places(int k0) const {
        return storage.places[u32(k0) / BLOCK_K % PLACE_TILES];
    }

    __device__ u32 staging(int warp) const {
        return tensors + TENSOR_BYTES + warp * STAGING_BYTES;
    }
    __device__ char* out() const { return memory + TENSOR_BYTES; }
    __device__ char* bias() const { return memory + TENSOR_BYTES + OUT_BYTES; }

    __device__ Barrier q_full(int warpgroup, int parity) const {
        return {shared_address(storage.q_full + 2 * warpgroup + parity)};
    }
    __device__ Barrier q_empty(int stage) const {
        return {shared_address(storage.q_empty + stage)};
    }
    __device__ KeyBarrier k_full(int stage) const { return {shared_address(storage.k_full + stage)}; }
    __device__ Barrier k_empty(int stage) const {
        return {shared_address(storage.k_empty + stage)};
    }
    __device__ KeyBarrier v_full(int stage) const { return {shared_address(storage.v_full + stage)}; }
    __device__ Barrier v_empty(int stage) const {
        return {shared_address(storage.v_empty + stage)};
    }
    __device__ Barrier pass_done() const { return {shared_address(&storage.pass_done)}; }
    __device__ WorkTile& found() const { return storage.work_tiles[Q_STAGES + HAS_SCHEDULER - 1]; }
    __device__ Barrier found_full() const { return {shared_address(&storage.found_full)}; }
    __device__ Barrier found_empty() const { return {shared_address(&storage.found_empty)}; }

    // The producer thread hands a request to the gather warps, whose last request has been copied.
    __device__ void send(const KeyRequest& request) const {
        if constexpr (GATHERED) mailbox().request = request, mailbox_full().arrive();
    }
    __device__ Mailbox& mailbox() const { return reinterpret_cast<Mailbox&>(storage.mailbox); }
    __device__ Barrier mailbox_full() const { return {shared_address(&mailbox().full)}; }
    __device__ Barrier mailbox_empty() const { return {shared_address(&mailbox().empty)}; }

    // The named barriers of one warpgroup, and of all consumers of the group.
    __device__ int warpgroup_barrier(int warpgroup) const {
        return barrier_id(NamedBarrier::WARPGROUP, group * CONSUMERS + warpgroup);
    }
    __device__ int consumer_barrier() const { return barrier_id(NamedBarrier::CONSUMERS, group); }

    // True if a pass left this iteration unfinished, or one that shares its bit.
    __device__ bool needs_redo(int pass, int iteration) const {
        return storage.redo[pass].iterations[iteration % TRACKED / 32] >> iteration % 32 & 1;
    }
    __device__ bool any_redo(int pass) const { return count(pass) > 0; }
    __device__ bool many_unfinished(int pass) const { return count(pass) > 1; }
    __device__ u32 count(int pass) const {
        return *static_cast<volatile u32*>(&storage.redo[pass].count);
    }
    __device__ void mark_redo(int pass, int iteration) const {
        const u32 bit = 1u << iteration % 32;
        auto& left = storage.redo[pass];
        if (!(atomicOr(left.iterations + iteration % TRACKED / 32, bit) & bit))
            atomicAdd(&left.count, 1);
    }

    // One thread of the first group initialises all groups.
    __device__ void init() const {
        for (int n = 0; n < GROUPS; ++n) Smem(memory, &storage, n).init_group();
        fence_barrier_init();
    }
    __device__ void init_group() const {
        for (int g = 0; g < CONSUMERS; ++g) q_full(g, 0).init(1), q_full(g, 1).init(1);
        for (int s = 0; s < Q_STAGES; ++s) q_empty(s).init(WARPGROUP);
        constexpr int LOADERS = GATHERED ? GATHER_WARPS * WARP : QUANTISED ? 1 + WARP : 1;
        constexpr int READERS = QUANTISED ? WARPS_M : CONSUMERS;  // of values
        for (int s = 0; s < STAGES; ++s) {
            k_full(s).init(LOADERS), k_empty(s).init(CONSUMERS);
            v_full(s).init(LOADERS), v_empty(s).init(READERS);
        }
        if (GATHERED) mailbox_full().init(1), mailbox_empty().init(GATHER_WARPS);
        pass_done().init(CONSUMERS);
        found_full().init(1), found_empty().init(1);
        storage.stops = false;
        for (auto& left : storage.redo) {
            left.count = 0;
            for (u32& bits : left.iterations) bits = 0;
        }
    }
};
