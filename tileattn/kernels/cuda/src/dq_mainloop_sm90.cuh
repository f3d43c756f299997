// Layer 3. Hopper's kernels that compute only dQ, without their GEMMs: the producer, which loads values and keys
// alternately into one circular buffer, and dS.
#pragma once

#include "gradient.cuh"
#include "row_counter.cuh"
#include "wide_dq_smem_sm90.cuh"

// The key tiles that masks leave to a block of queries, ascending, 32 at a time. All lanes of the producer
// warp call.
constexpr int NO_TILE = -1;
struct KeyTiles {
    int base;
    u32 listed = 0, partial = 0;

    __device__ explicit KeyTiles(const WorkTile& work) : base(work.begin - WARP) {}

    // Return the TileEntry of the next tile, or NO_TILE after the last.
    __device__ int find(const Params& p, const WorkTile& work) {
        while (!listed) {
            base += WARP;
            if (base >= work.end) return NO_TILE;
            const AttentionMask attn_mask(p, work.sequence(p), work.h);
            const int q0 = work.q0, own = base + int(threadIdx.x) % WARP, k0 = own * BLOCK_K;
            const int kind =
                own < work.end ? attn_mask.kind(q0, q0 + BLOCK_Q, k0, k0 + BLOCK_K) : EMPTY;
            listed = __ballot_sync(~0u, kind != EMPTY), partial = __ballot_sync(~0u, kind == PARTIAL);
        }
        const int bit = __ffs(int(listed)) - 1;
        listed &= listed - 1;
        return TileEntry::of(base + bit, partial >> bit & 1);
    }
};

// One thread produces. If masks leave out tiles, its whole warp does, to search for the others; electing a
// thread for each load would then need too many registers.
constexpr bool PRODUCES_ALONE = !HAS_TILE_LIST;
constexpr u32 PRODUCER_LANES = PRODUCES_ALONE ? 1 : ~0u;
__device__ inline bool leads() { return PRODUCES_ALONE || threadIdx.x % WARP == 0; }

__device__ inline void produce(const Params& p, const BackwardMaps& maps, const Smem& smem) {
    PipelineState<1> work_pipe;
    PipelineState<STAGES> pipe;
    WorkTile work{};
    PairClaims claims{smem.storage.claims};
    // The first columns of this CTA.
    const int column = own_half() * HEAD_COLUMNS, v_column = own_half() * VALUE_COLUMNS;
    auto claim = [&] {
        auto claim = [&] { return atomicAdd(p.tile_counter + 1, 1); };
        if constexpr (PAIR) return claims.next(claim);
        return claim();
    };
    // Claim the next work tile, longest first.
    auto find = [&] {
#pragma unroll 1
        for (;;) {
            const u32 index = leads() ? claim() : 0;
            if (!get_work(p, int(uniform(index, PRODUCER_LANES)), work)) break;
            if (PACKED && work.q0 >= work.Nq(p)) continue;
            const u32 kv = u32(work.h) / u32(p.group);
            wait_for_rows(p, i64(work.b) * p.Hkv + kv);
            // Generic kernels compute flagged heads.
            if (!(head_flags(p, work.b, kv) & KNOWN)) return;
        }
        work.is_end = true;
    };
    auto publish_work = [&] {
#pragma unroll 1
        for (int g = 0; g < CONSUMERS; ++g) {
            smem.q_empty(g).wait(work_pipe.phase ^ 1);
            if (!leads()) continue;
            WorkTile& share = smem.storage.work_tiles[g];
            const Barrier full = smem.q_full(g);
            const int q0 = work.q0 + WARPGROUP_ROWS * g, row = work.q_start + q0;
            if (work.is_end)
                full.arrive(), full.arrive();
            else
                BOTH_LOADS(
                    smem.q(g).load<LOAD_UNROLL>(maps.q, row, work.h, work.entry(), full, column),
                    smem.dout(g).load<LOAD_UNROLL>(maps.dout, row, work.h, work.entry(), full,
                                                   v_column));
            share = work, share.q0 = q0;
            if (!HAS_TILE_LIST) {
                const SlidingWindow window(p, work.sequence(p));
                share.tiles = key_tiles(p, work, window, q0, WARPGROUP_ROWS);
            }
            full.arrive();
        }
        work_pipe.advance();
        __syncwarp(PRODUCER_LANES);
    };
    WorkTile own = work;
    KeyTiles tiles(own);
    int kv = 0, entry = NO_TILE;  // the TileEntry to load next
    bool looks = true;            // the next work tile has not been found
    // Each load appears once in the code: the instruction cache is small.
#pragma unroll 1
    for (;;) {
        if (entry >= 0) {
            const int tile = TileEntry{entry}.tile(), row = own.k_start + tile * BLOCK_K;
            const int next = HAS_TILE_LIST        ? tiles.find(p, own)
                             : tile + 1 < own.end ? entry + 2  // not partial: the window decides
                                                  : NO_TILE;
            smem.empty(pipe.stage).wait(pipe.phase ^ 1);
            if (leads()) {
                if (HAS_TILE_LIST)
                    smem.storage.tiles[pipe.stage] = StagedTile::of({entry}, next < 0);
                load_own_first(smem.v(pipe.stage), maps.v, row, kv, own.entry(),
                               smem.full(pipe.stage), v_column);
            }
            pipe.advance();
            smem.empty(pipe.stage).wait(pipe.phase ^ 1);
            if (leads())
                load_own_first(smem.k(pipe.stage), maps.k, row, kv, own.entry(),
                               smem.full(pipe.stage), column);
            pipe.advance();
            entry = next;
            __syncwarp(PRODUCER_LANES);  // no lane misses a phase that it waits for
        }
        if (looks) {
            find(), looks = false;
            // Shared memory is occupied, so prefetch the next queries to the L2 cache.
            if (!work.is_end && leads())
#pragma unroll 1
                for (int row = 0; row < BLOCK_Q; row += WARPGROUP_ROWS) {
                    const int first = work.q_start + work.q0 + row;
                    QueryTile::prefetch(maps.q, first, work.h, work.entry(), column);
                    DoutTile::prefetch(maps.dout, first, work.h, work.entry(), v_column);
                }
        }
        if (entry < 0) {
            if (work.is_end) break;
            own = work, tiles = KeyTiles(own), kv = u32(own.h) / u32(p.group);
            entry = HAS_TILE_LIST         ? tiles.find(p, own)
                    : own.begin < own.end ? TileEntry::of(own.begin, false)
                                          : NO_TILE;
            if (entry < 0) work.tiles.end = work.tiles.begin = work.begin = work.end = 0;
            publish_work();
            looks = true;
        }
    }
    publish_work();
}

// A consumer warpgroup zeroes the rows of a tile of keys or values that no query attends to: NaN or infinity there
// would make dQ NaN. Each warpgroup does this for its own GEMMs; the other stores the same zeros.
template <class Tile>
__device__ inline void zero_unattended(const Tile& rows, int columns, int tile, const Range& attended,
                                       int warpgroup) {
    const int begin = attended.lo - tile * BLOCK_K, end = attended.hi - tile * BLOCK_K;
    if (!__any_sync(~0u, begin > 0 || end < BLOCK_K)) return;
    const u32 zeros[4] = {};
    const int chunks = columns / 8;
#pragma unroll 1
    for (int i = threadIdx.x % WARPGROUP; i < BLOCK_K * chunks; i += WARPGROUP) {
        const int row = i / chunks, key = unswapped<BLOCK_K>(row);
        if (key < begin || key >= end) store_shared(rows.chunk(row, i % chunks * 16), zeros);
    }
    fence_async_shared();
    sync_warpgroup(warpgroup);
}

// Keys that some query attends to. TMA has zeroed rows past the end of the array.
__device__ inline Range attended_keys(const Params& p, const WorkTile& work) {
    const SlidingWindow window(p, work.sequence(p));
    Range attended = window.key_range(0, window.Nq);
    if (attended.hi + work.k_start >= p.Nk) attended.hi = FAR;
    return attended;
}

// lse and delta of a lane's two rows, in a warp whose first row is row0 of the work tile.
__device__ inline void load_statistics(const Params& p, const WorkTile& work, int row0, Accum (&lse_log2)[2],
                                       Accum (&delta)[2]) {
    const i64 first = (i64(work.entry()) * p.Hq + work.h) * p.rows + padded_start(work.q_start, work.b) + work.q0 +
                      row0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const i64 row = first + Lane().row(2 * half);
        lse_log2[half] = static_cast<const Accum*>(p.lse_log2)[row];
        delta[half] = static_cast<const Accum*>(p.delta)[row];
    }
}

// Clear the rows past the end of a packed sequence: they belong to the next one.
template <int DT>
__device__ inline void clear_past_end(const Params& p, const WorkTile& work, int row0, Fragment<Accum, 1, DT>& dq) {
    if constexpr (PACKED)
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (work.q0 + row0 + Lane().row(2 * half) >= work.Nq(p))
#pragma unroll
                for (int n = 0; n < DT; ++n) dq.x[0][n][2 * half] = dq.x[0][n][2 * half + 1] = 0;
}

// Columns of atoms whose scores are recomputed at a time. Derivatives, mask_mod and dropout need registers.
template <int NT>
constexpr int DS_CHUNK = HAS_SCORE_GRAD || HAS_MASK_MOD || HAS_DROPOUT ? 2 : NT;

// From S and dP to dS, of rows and columns as in `s`. Call done(n) when atoms n - 1 and n are complete.
template <int NT, class Bias, class Done>
__device__ __forceinline__ void compute_ds(const Params& p, const WorkTile& work, bool partial, const Bias& bias,
                                           const Accum (&lse_log2)[2], const Accum (&delta)[2],
                                           Scores<false, 1, NT>& s, Fragment<Accum, 1, NT>& dp, Done done) {
    constexpr int CHUNK = DS_CHUNK<NT>;
    constexpr bool CHUNKED = CHUNK < NT;
    const ScoreMod score_mod(p, work.b, work.h);
    const AttentionMask attn_mask(p, work.sequence(p), work.h);
    const Dropout dropout(p, work.b, work.h);
    const Accum softmax_scale_log2 = score_mod.softmax_scale_log2();
    Fragment<Accum, 1, HAS_SCORE_GRAD ? NT : 1> slopes;
    DenseMask<false, 1, NT> dense;
    if constexpr (HAS_MASK) dense.load(attn_mask, s.row, s.column);
    auto finish = [&](int begin, int end) {
#pragma unroll
        for (int n = begin; n < end; ++n) {
            if constexpr (HAS_DROPOUT)
                if (n % 2 == 0)
                    dropout.for_columns<false, 1>(s.row, s.column, n, [&](int, int n, int e, bool kept) {
                        Accum& x = dp.x[0][n][e];
                        x = kept ? x * Accum(p.dropout_scale) : Accum(0);
                    });
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                Accum& x = dp.x[0][n][e];
                const Accum P = exp2_of(exponent(s.x[0][n][e], softmax_scale_log2, lse_log2[e / 2]));
                x = score_gradient(P, x, delta[e / 2]);
                if constexpr (HAS_SCORE_GRAD) x *= slopes.x[0][n][e];
            }
            if (n % 2) done(n);
        }
    };
    auto record = [&](int, int n, int e, Accum dsoftcap, Accum dfunction) {
        if constexpr (HAS_SCORE_GRAD) slopes.x[0][n][e] = dsoftcap * dfunction;
    };
#pragma unroll
    for (int n = 0; n < NT; n += CHUNK) {
        begin_chunk<CHUNKED>(s);
        s.apply(score_mod, bias, record, n, n + CHUNK);
        if (partial) s.masked_fill_positions(attn_mask, n, n + CHUNK);
        if constexpr (!HAS_MASK) finish(n, n + CHUNK);
        // Scores are -infinity where masked out: then the warp sleeps for a nanosecond.
        end_chunk<CHUNKED>(s, n + CHUNK, -infinity<Accum>());
    }
    if constexpr (HAS_MASK) {
        dense.share();
        s.masked_fill(dense);
        finish(0, NT);
    }
}
