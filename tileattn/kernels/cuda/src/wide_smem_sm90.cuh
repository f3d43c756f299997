// Layer 3. Shared memory of Hopper's forward kernel for wide heads, and what its two CTAs exchange: row
// maxima and P.
#pragma once

#include "cluster.cuh"
#include "gemm_sm90.cuh"
#include "softmax.cuh"
#include "warpgroups_sm90.cuh"

static_assert(PAIR && BLOCK_Q == 2 * WARPGROUP_ROWS && WARPS_N == 1 && GROUPS == 1,
              "two CTAs, each with two consumer warpgroups");

// Each CTA computes the scores of half of the keys of a tile, and half of the columns of O.
constexpr int OWN_KEYS = BLOCK_K / 2;
constexpr int NT = OWN_KEYS / 8, VT = VALUE_COLUMNS / 8;

// Keys and values are loaded in parts: keys 128 columns at a time, values 32 keys at a time. A slot of the
// circular buffer holds one part of either.
constexpr int PART_COLUMNS = 128, PART_KEYS = 32;
constexpr int KEY_PARTS = (HEAD_DIM + PART_COLUMNS - 1) / PART_COLUMNS;
constexpr int VALUE_PARTS = BLOCK_K / PART_KEYS;
using QueryTile = SmemTile<WARPGROUP_ROWS, HEAD_DIM>;  // of one warpgroup
using KeyTile = SmemTile<OWN_KEYS, PART_COLUMNS>;
using ValueTile = SmemTile<PART_KEYS, VALUE_COLUMNS>;
using ProbTile = SmemTile<WARPGROUP_ROWS, OWN_KEYS>;  // of one warpgroup, from the other CTA
static_assert(ValueTile::BYTES <= KeyTile::BYTES, "a slot has the size of a part of the keys");
// While a warpgroup waits for the last values it holds the last keys and all values.
static_assert(STAGES > VALUE_PARTS, "the producer must be able to load all values");

// Columns of a part of the keys.
__device__ constexpr int part_columns(int part) {
    return HEAD_DIM - part * PART_COLUMNS < PART_COLUMNS ? HEAD_DIM - part * PART_COLUMNS
                                                         : PART_COLUMNS;
}

// Layout of dynamic shared memory.
struct Tensors {
    QueryTile::Storage q[CONSUMERS];
    ProbTile::Storage p[CONSUMERS];
    KeyTile::Storage slots[STAGES];
};
static_assert(int(sizeof(Tensors)) == SHARED_BYTES, "what a launch brings");

constexpr int ROW_BYTES = 8 * 2 * int(sizeof(Accum));  // a number for each of the 16 rows of a warp

// Static shared memory.
struct SharedStorage {
    u64 full[STAGES], empty[STAGES], q_full, p_full[CONSUMERS], p_empty[CONSUMERS];
    u64 rows_full[WARPS_M][2];
    alignas(16) char rows[WARPS_M][2][ROW_BYTES];  // from the other CTA
};
static_assert(sizeof(SharedStorage) <= 2048, "what the tensors leave");

struct Smem {
    u32 tensors;  // address of the dynamic part
    SharedStorage& storage;

    __device__ QueryTile q(int warpgroup) const {
        return {tensors + warpgroup * QueryTile::BYTES};
    }
    __device__ ProbTile p(int warpgroup) const {
        return {q(CONSUMERS).address + warpgroup * ProbTile::BYTES};
    }
    __device__ u32 slot(int n) const { return p(CONSUMERS).address + n * KeyTile::BYTES; }
    __device__ Barrier full(int slot) const { return {shared_address(storage.full + slot)}; }
    __device__ Barrier empty(int slot) const { return {shared_address(storage.empty + slot)}; }
    __device__ Barrier q_full() const { return {shared_address(&storage.q_full)}; }
    // P of the other CTA has landed; the other CTA has consumed P of this one.
    __device__ Barrier p_full(int warpgroup) const {
        return {shared_address(storage.p_full + warpgroup)};
    }
    __device__ Barrier p_empty(int warpgroup) const {
        return {shared_address(storage.p_empty + warpgroup)};
    }

    // One thread initialises the barriers.
    __device__ void init() const {
        for (int n = 0; n < STAGES; ++n) full(n).init(1), empty(n).init(WARPS_M);
        q_full().init(CONSUMERS);
        for (int n = 0; n < CONSUMERS; ++n) p_full(n).init(1), p_empty(n).init(4);
        for (auto& both : storage.rows_full)
            for (u64& one : both) Barrier{shared_address(&one)}.init(1);
        fence_barrier_init();
    }
};

// Reductions of the rows of a warp, whose keys two CTAs share: each warp exchanges its numbers with the same
// warp of the other CTA. Both get the same bits, since the combination is commutative.
//
// Two buffers alternate. The numbers of exchange n + 2 overwrite those of n, and their bytes count for the
// next phase of the same barrier. They are sent after exchange n + 1 has been received, which this warp sent
// after it had waited for exchange n and read it.
struct PairedWarp {
    u32 rows, full, peer_rows, peer_full;
    mutable u32 exchanges = 0;

    __device__ explicit PairedWarp(const Smem& smem)
        : rows(shared_address(smem.storage.rows[threadIdx.x / WARP]) + Lane().g * 8),
          full(shared_address(smem.storage.rows_full[threadIdx.x / WARP])),
          peer_rows(peer_address(rows)),
          peer_full(peer_address(full)) {}

    // `beside` is called while the numbers are on their way.
    template <class Combine, class Beside = Nothing>
    __device__ void all_reduce(Accum (&x)[1][2], Combine combine, Beside beside = {}) const {
        reduce_lanes(x, combine);
        const u32 buffer = exchanges % 2, at = buffer * ROW_BYTES;
        const Barrier landed{full + buffer * 8};
        if (threadIdx.x % WARP == 0) landed.arrive_and_expect_tx(ROW_BYTES);
        if (Lane().t == 0) send_peer(peer_rows + at, peer_full + buffer * 8, x[0][0], x[0][1]);
        beside();
        landed.wait(exchanges / 2 % 2);
        float other[2];
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(other[0]), "=f"(other[1])
                     : "r"(rows + at)
                     : "memory");
        x[0][0] = combine(x[0][0], other[0]), x[0][1] = combine(x[0][1], other[1]);
        ++exchanges;
    }
};

// The same with work beside the exchange.
template <class Beside>
struct PairedWarpBeside {
    const PairedWarp& group;
    Beside beside;

    template <class Combine>
    __device__ void all_reduce(Accum (&x)[1][2], Combine combine) const {
        group.all_reduce(x, combine, beside);
    }
};
template <class Beside>
__device__ PairedWarpBeside(const PairedWarp&, Beside) -> PairedWarpBeside<Beside>;

// Transpose a 4 x 4 matrix whose columns the four lanes of a row hold: lane t gets row t.
__device__ inline void transpose_in_row(u32 (&x)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
        const u32 got = __shfl_xor_sync(~0u, odd ? x[n] : x[n + 1], 1);
        (odd ? x[n] : x[n + 1]) = got;
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const u32 got = __shfl_xor_sync(~0u, upper ? x[n] : x[n + 2], 2);
        (upper ? x[n] : x[n + 2]) = got;
    }
}

// Send P of 16 rows of each warp to the same rows of a tile in the other CTA, 16 bytes at a time.
__device__ inline void send_probs(const ProbTile& tile, const Barrier& full,
                                  const Atom<Element>::A (&probs)[OWN_KEYS / 16]) {
    const Lane lane;
    const u32 to = peer_address(tile.address), landed = peer_address(full.address);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = threadIdx.x % WARPGROUP / WARP * 16 + lane.row(2 * half);
#pragma unroll
        for (int n = 0; n < NT; n += 4) {
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = probs[(n + i) / 2].r[(n + i) % 2 * 2 + half];
            transpose_in_row(x);
            send_peer(to + row * ProbTile::PITCH + ((n + lane.t) ^ row % 8) * 16, landed, x);
        }
    }
}
