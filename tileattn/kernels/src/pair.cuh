// Layer 3. Two CTAs that share a work tile of wide heads. Each has half of the columns of all
// operands, and a part of each score. They exchange the parts: then both have the scores, with the
// same bits.
#pragma once

#include "cluster.cuh"
#include "config.cuh"

// Which half of the columns this CTA has.
__device__ inline int own_half() { return PAIR ? int(cluster_rank()) : 0; }

// Whether x holds for any thread of a work tile.
__device__ inline bool any_of_work_tile(bool x) {
    bool any = __syncthreads_or(x);
    if constexpr (PAIR) {
        __shared__ __align__(16) Accum peer_has[2];
        if (threadIdx.x == 0) store_peer(peer_address(shared_address(peer_has)), Accum(any), 0);
        arrive_at_peer();
        wait_for_peer();
        any = any || peer_has[0] != 0;
    }
    return any;
}

// Store a fragment to a tile of the other CTA, as store_fragment does to one of this.
template <class T, int R, int C, class S, int MT, int NT>
__device__ inline void send_fragment(const Tile<T, R, C>& tile, const Fragment<S, MT, NT>& c,
                                     int m0, int n0) {
    const u32 peer = peer_address(tile.address);
    const Lane lane;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; e += 2)
                store_peer(peer + Tile<T, R, C>::template at<8 * NT>(
                                      m0 + lane.g, n0 + 2 * lane.t, 16 * m + 4 * e, 8 * n),
                           c.x[m][n][e], c.x[m][n][e + 1]);
}

// Add what the other CTA has sent.
template <class T, int R, int C, class S, int MT, int NT>
__device__ inline void add_fragment(Fragment<S, MT, NT>& c, const Tile<T, R, C>& tile, int m0,
                                    int n0) {
    const Lane lane;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const auto x = tile.pair(Tile<T, R, C>::template at<8 * NT>(
                    m0 + lane.g, n0 + 2 * lane.t, 16 * m + 4 * e, 8 * n));
                c.x[m][n][e] += x.x, c.x[m][n][e + 1] += x.y;
            }
}
