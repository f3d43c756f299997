// Layer 3. Two CTAs that share a work tile of wide heads. Each has half of the columns of all operands, so
// it computes a part of each score. They exchange the parts, and then have bitwise identical scores.
#pragma once

#include "cluster.cuh"
#include "config.cuh"
#include "tma_sm90.cuh"

// The half of the columns that this CTA has, 0 or 1.
__device__ inline int own_half() { return PAIR ? int(cluster_rank()) : 0; }

// True if x is true for any thread of a work tile.
__device__ inline bool any_of_work_tile(bool x) {
    bool any = __syncthreads_or(x);
    if constexpr (PAIR) {
        __shared__ u32 peer_has;
        if (threadIdx.x == 0) store_peer(peer_address(shared_address(&peer_has)), any);
        arrive_at_peer();
        wait_for_peer();
        any = any || peer_has;
    }
    return any;
}

// The exchange between a warp and the same warp of the other CTA. Each warp stores to its own part of a
// tile in the other CTA. `full`: all bytes have landed. `empty`: the receiver has released its part of the
// tile, which it does before each send. A warp waits neither for other warps nor, as with a cluster
// barrier, for its adds to device memory. A CTA must not end while stores to it are in flight, so the CTAs
// synchronise at the end.
struct Mail {
    struct Barriers {
        u64 full[WARPS_M * WARPS_N], empty[WARPS_M * WARPS_N];
    };
    Barrier full, empty;
    u32 phase = 0;

    // The CTAs must synchronise after this and before the first release.
    __device__ explicit Mail(Barriers& all)
        : full{shared_address(all.full + threadIdx.x / WARP)},
          empty{shared_address(all.empty + threadIdx.x / WARP)} {
        if constexpr (PAIR)
            if (threadIdx.x % WARP == 0) full.init(1), empty.init(1), fence_barrier_init();
    }

    // Let the other CTA send. This warp has used what it read there, and a barrier has ordered the reads of
    // other warps. All these accesses are generic, like st.async, so no proxy fence is needed.
    __device__ void release() const {
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive_at_peer(peer_address(empty.address));
    }

    template <class T, int R, int C, int MT, int NT>
    __device__ void send(const Tile<T, R, C>& tile, const Fragment<Accum, MT, NT>& c, int m0,
                         int n0) const {
        static_assert(!PAIR || sizeof(Accum) == 8, "send_peer stores doubles");
        empty.wait(phase);
        const u32 peer = peer_address(tile.address), landed = peer_address(full.address);
        for_neighbours<Tile<T, R, C>>(c, m0, n0, [&](int at, const Accum* x) {
            send_peer(peer + at, landed, x[0], x[1]);
        });
    }

    // Wait for the fragment of the other CTA, and add it.
    template <class T, int R, int C, int MT, int NT>
    __device__ void add(const Tile<T, R, C>& tile, Fragment<Accum, MT, NT>& c, int m0, int n0) {
        if (threadIdx.x % WARP == 0) full.arrive_and_expect_tx(MT * NT * 128 * int(sizeof(Accum)));
        full.wait(phase);
        phase ^= 1;
        for_neighbours<Tile<T, R, C>>(c, m0, n0, [&](int at, Accum* x) {
            const auto sent = tile.pair(at);
            x[0] += sent.x, x[1] += sent.y;
        });
    }

    // Call visit(offset, pair) for each two neighbours of a fragment, with the offset at which
    // store_fragment stores them.
    template <class X, class C, class Visit>
    __device__ static void for_neighbours(C& c, int m0, int n0, Visit visit) {
        constexpr int MT = sizeof(c.x) / sizeof(*c.x), NT = sizeof(*c.x) / sizeof(**c.x);
        const Lane lane;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; e += 2)
                    visit(X::template at<8 * NT>(m0 + lane.g, n0 + 2 * lane.t, 16 * m + 4 * e,
                                                 8 * n),
                          c.x[m][n] + e);
    }
};
