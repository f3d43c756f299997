// Layer 3. Two CTAs that share a work tile of wide heads. Each has half of the columns of all
// operands, and a part of each score. They exchange the parts: then both have the scores, with the
// same bits.
#pragma once

#include "cluster.cuh"
#include "config.cuh"
#include "tma_sm90.cuh"

// Which half of the columns this CTA has.
__device__ inline int own_half() { return PAIR ? int(cluster_rank()) : 0; }

// Whether x holds for any thread of a work tile.
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

// What a warp and the same warp of the other CTA send each other, each to its own place in a tile
// of the other. `full`: all has landed. `empty`: the other has released the place, as it does
// before each send. No warp waits for other warps, nor, as at a barrier of the cluster, for its
// adds in device memory. Neither CTA may end while something is under way to it: they meet again.
struct Mail {
    struct Barriers {
        u64 full[WARPS_M * WARPS_N], empty[WARPS_M * WARPS_N];
    };
    Barrier full, empty;
    u32 phase = 0;

    // The CTAs meet between this and the first release.
    __device__ explicit Mail(Barriers& all)
        : full{shared_address(all.full + threadIdx.x / WARP)},
          empty{shared_address(all.empty + threadIdx.x / WARP)} {
        if constexpr (PAIR)
            if (threadIdx.x % WARP == 0) full.init(1), empty.init(1), fence_barrier_init();
    }

    // The other may send: this warp has used what it read there, and other warps that did are
    // behind a barrier. All of that is generic, and so is st.async: no proxy fence.
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

    // Wait for what the other has sent, and add it.
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

    // visit(bytes from the base of the tile, two neighbours): where store_fragment stores them.
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
