// Layer 3. Two CTAs that share a work tile of Hopper's backward kernels, for head dimensions above 256. Each
// has half of the columns of all operands, so a GEMM over columns gives a part of each score. Each CTA adds the
// parts of half of the scores, computes P or dS of these, and sends it to the other, rounded as an operand. The
// rows of a tile of queries or keys are swapped in the second CTA, so that in both the first half is their own.
#pragma once

#include "gemm_sm90.cuh"
#include "pair.cuh"
#include "warpgroups_sm90.cuh"

constexpr int SHARES = PAIR ? 2 : 1;  // of the scores of a tile

// The row of the first CTA's tile that is row `row` of this CTA's tile.
template <int ROWS>
__device__ inline int unswapped(int row) {
    return PAIR ? row ^ own_half() * (ROWS / 2) : row;
}

// Load a tile with this CTA's own half of the rows first.
template <class Tile>
__device__ inline void load_own_first(const Tile& tile, const TensorMap& map, int row, int head,
                                      int batch, const Barrier& full, int column) {
    if constexpr (PAIR)
        tile.template load_halves<LOAD_UNROLL>(map, row, head, batch, full, column, own_half());
    else
        tile.template load<LOAD_UNROLL>(map, row, head, batch, full);
}

// The accumulators of a GEMM of scores: the scores themselves, or in paired CTAs their parts.
template <class Scores, class Parts>
__device__ inline auto& accumulators(Scores& scores, Parts& parts) {
    if constexpr (PAIR)
        return parts;
    else
        return scores;
}

// The operands of a CTA's own half of the scores: the first ones.
template <int K, class A, int ALL>
__device__ inline A (&own_operands(A (&all)[ALL]))[K] {
    return reinterpret_cast<A(&)[K]>(all);
}

// Messages between a warp and the same warp of the other CTA, through a tile in shared memory. `full`: all
// bytes of a message have landed. `empty`: the receiver has released the tile. Each warp has barriers of its
// own, so it waits for no other warp.
struct Exchange {
    struct Barriers {
        static constexpr int COUNT = PAIR ? 4 : 1;
        u64 full[COUNT], empty[COUNT];

        // One thread initialises the barriers.
        __device__ void init() {
            for (int w = 0; w < COUNT; ++w)
                Barrier{shared_address(full + w)}.init(1), Barrier{shared_address(empty + w)}.init(1);
        }
    };
    u32 tile;  // address
    Barrier full, empty;
    u32 phase = 0;

    __device__ Exchange(u32 tile, Barriers& all)
        : tile(tile),
          full{shared_address(all.full + threadIdx.x / WARP % Barriers::COUNT)},
          empty{shared_address(all.empty + threadIdx.x / WARP % Barriers::COUNT)} {}

    // Keep the own parts of the scores, the first half, and send the parts that the other CTA adds.
    template <int PARTS, int NT>
    __device__ void send(const Fragment<float, 1, PARTS>& parts, Fragment<float, 1, NT>& own) const {
        static_assert(PARTS == SHARES * NT);
        const u32 to = wait_empty(), landed = peer_address(full.address);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            send_peer(to + EXCHANGE_PITCH * n, landed, parts.x[0][PARTS - NT + n]);
#pragma unroll
            for (int e = 0; e < 4; ++e) own.x[0][n][e] = copied(parts.x[0][n][e]);
        }
    }
    // Add the parts of the other CTA.
    template <int NT>
    __device__ void add(Fragment<float, 1, NT>& own) {
        wait_full(NT);
        Fragment<float, 1, NT> other;
        load_exchange(other, tile);
        bool never = false;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) own.x[0][n][e] += other.x[0][n][e];
            never = never || own.x[0][n][3] == infinity<float>();
        }
        order_after(never);  // each load has ended before the tile is released
    }
    // Send the operands of this CTA's half of the scores, then receive the operands of the other half.
    template <class A, int K>
    __device__ void send(const A (&own)[K]) const {
        const u32 to = wait_empty(), landed = peer_address(full.address);
#pragma unroll
        for (int k = 0; k < K; ++k) send_peer(to + EXCHANGE_PITCH * k, landed, own[k].r);
    }
    template <class A, int ALL>
    __device__ void receive(A (&all)[ALL]) {
        wait_full(ALL / 2);
#pragma unroll
        for (int k = 0; k < ALL / 2; ++k) {
            u32(&r)[4] = all[ALL / 2 + k].r;
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                         : "r"(exchange_slot(tile) + EXCHANGE_PITCH * k)
                         : "memory");
        }
        order_after(all);  // as above
    }
    // Let the other CTA send again: this warp has used what it read in the tile. All accesses to the tile
    // are generic, st.async included, so no proxy fence is needed.
    __device__ void release() const {
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive_at_peer(peer_address(empty.address));
    }

    // The first message finds the tile empty. Returns this thread's place in the tile of the other CTA.
    __device__ u32 wait_empty() const {
        empty.wait(phase ^ 1);
        return peer_address(exchange_slot(tile));
    }
    // Wait for a message of some vectors of 16 bytes for each thread.
    __device__ void wait_full(int vectors) {
        if (threadIdx.x % WARP == 0) full.arrive_and_expect_tx(vectors * WARP * 16);
        full.wait(phase);
        phase ^= 1;
    }
};

// The claims of work tiles for both CTAs: the first CTA claims, and sends the number to the second.
struct PairClaims {
    struct Shared {
        u64 full, empty;  // of `number`, in the second CTA; `empty` is used in the first
        u32 number;

        __device__ void init() {
            Barrier{shared_address(&full)}.init(1), Barrier{shared_address(&empty)}.init(1);
        }
    };
    Shared& shared;
    u32 phase = 0;
    bool claimed = false;

    // One thread of each CTA calls; claim() is called in the first CTA only.
    template <class Claim>
    __device__ u32 next(Claim claim) {
        const Barrier full{shared_address(&shared.full)}, empty{shared_address(&shared.empty)};
        const u32 at = shared_address(&shared.number);
        u32 number;
        if (own_half() == 0) {
            number = claim();
            empty.wait(phase ^ 1);
            send_peer(peer_address(at), peer_address(full.address), number);
        } else {
            // The first CTA waits for this before it sends again. So none is on its way after the last claim.
            if (claimed) arrive_at_peer(peer_address(empty.address));
            full.arrive_and_expect_tx(4);
            full.wait(phase);
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(number) : "r"(at) : "memory");
        }
        phase ^= 1, claimed = true;
        return number;
    }
};

// Wait for all warps of both CTAs that have not exited: at the start until both have initialised their
// barriers, and at the end until no store or arrival is on its way to this CTA. Warps must converge.
__device__ inline void sync_pair() {
    if constexpr (PAIR) __syncwarp(), arrive_at_peer(), wait_for_peer();
}
