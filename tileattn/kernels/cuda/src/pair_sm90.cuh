// Layer 3. Two CTAs that share a work tile of Hopper's backward kernels, for head dimensions above 256. Each
// has half of the columns of all operands, so a GEMM over columns gives a part of each score. Both add the
// two parts, and then have bitwise identical scores.
#pragma once

#include "gemm_sm90.cuh"
#include "pair.cuh"
#include "warpgroups_sm90.cuh"

// The sums of two parts of a tile of scores: a warp sends its fragment to a tile in the other CTA, and adds
// the fragment that comes to its own tile. `full`: all bytes of the other CTA have landed. `empty`: the
// other CTA has released its tile. Each warp has barriers of its own, so it waits for no other warp.
struct PartialSums {
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

    __device__ PartialSums(u32 tile, Barriers& all)
        : tile(tile),
          full{shared_address(all.full + threadIdx.x / WARP % Barriers::COUNT)},
          empty{shared_address(all.empty + threadIdx.x / WARP % Barriers::COUNT)} {}

    // Start to send a part. The first one finds the tile empty.
    template <int NT>
    __device__ void send(const Fragment<float, 1, NT>& part) const {
        empty.wait(phase ^ 1);
        const u32 to = peer_address(exchange_slot(tile)), landed = peer_address(full.address);
#pragma unroll
        for (int n = 0; n < NT; ++n) send_peer(to + EXCHANGE_PITCH * n, landed, part.x[0][n]);
    }
    // Wait for the part of the other CTA, and add it. The values in the tile have been used afterwards.
    template <int NT>
    __device__ void add(Fragment<float, 1, NT>& part) {
        if (threadIdx.x % WARP == 0) full.arrive_and_expect_tx(NT * WARP * 16);
        full.wait(phase);
        phase ^= 1;
        // Some atoms at a time, so that few registers hold what has been read.
        constexpr int STEP = 2;
#pragma unroll
        for (int first = 0; first < NT; first += STEP) {
            Fragment<float, 1, STEP> other;
            load_exchange(other, tile + EXCHANGE_PITCH * first);
#pragma unroll
            for (int n = 0; n < STEP; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) part.x[0][first + n][e] += other.x[0][n][e];
        }
        // Each load has ended before the tile is released.
        bool never = false;
#pragma unroll
        for (int n = 0; n < NT; ++n) never = never || part.x[0][n][3] == infinity<float>();
        order_after(never);
    }
    // Let the other CTA send again: this warp has used what it read in the tile. All accesses to the tile
    // are generic, st.async included, so no proxy fence is needed.
    __device__ void release() const {
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive_at_peer(peer_address(empty.address));
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
