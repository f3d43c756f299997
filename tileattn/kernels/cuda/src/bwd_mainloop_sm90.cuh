// Layer 3. The common parts of Hopper's backward kernels: the entry, the producer, the dQ store warps,
// the order of the tiles, and the epilogue.
#pragma once

#include "bwd_scores_sm90.cuh"
#include "dq_counter.cuh"
#include "lockstep.cuh"
#include "query_split_sums.cuh"
#include "row_counter.cuh"

// The index of a query in lse_log2 and delta.
__device__ inline i64 statistic_index(const Params& p, const WorkTile& work, int h, int q) {
    return (i64(work.entry()) * p.Hq + h) * p.rows + work.first_statistic() + q;
}

// The producer thread: claim and publish work tiles, and load what they need in the order of use.
__device__ inline void produce(const Params& p, const BackwardMaps& maps, const Smem& smem) {
    PipelineState<1> k_pipe;
    PipelineState<1> v_pipe;
    PipelineState<Q_STAGES> q_pipe;
    PipelineState<DOUT_STAGES> dout_pipe;
    WorkTile work{};
    Lockstep lockstep;
    PairClaims claims{smem.storage.claims};
    // The first columns of this CTA.
    const int column = own_half() * HEAD_COLUMNS, v_column = own_half() * VALUE_COLUMNS;
    auto claim = [&] {
        if constexpr (PAIR) return claims.next([&] { return claim_work(p); });
        return claim_work(p);
    };
    auto load_q = [&](int h, int q0, const float* lse_log2) {
        const Barrier full = smem.q_full(q_pipe.stage);
        smem.q_empty(q_pipe.stage).wait(q_pipe.phase ^ 1);
        const QueryTile tile = smem.q(q_pipe.stage);
        BOTH_LOADS(load_own_first(tile, maps.q, work.q_start + q0, h, work.entry(), full, column),
                   bulk_load(shared_address(smem.storage.lse_log2[q_pipe.stage]), lse_log2,
                             BLOCK_Q * 4, full));
        q_pipe.advance();
    };
    auto load_dout = [&](int h, int q0, const float* delta) {
        const Barrier full = smem.dout_full(dout_pipe.stage);
        smem.dout_empty(dout_pipe.stage).wait(dout_pipe.phase ^ 1);
        const DoutTile tile = smem.dout(dout_pipe.stage);
        BOTH_LOADS(load_own_first(tile, maps.dout, work.q_start + q0, h, work.entry(), full,
                                  v_column),
                   bulk_load(shared_address(smem.storage.delta[dout_pipe.stage]), delta, BLOCK_Q * 4,
                             full));
        dout_pipe.advance();
    };
    // Publish a work tile with its k, for which all consumers wait. The load of k, if any, starts first.
    auto publish_work = [&](bool with_k) {
        smem.k_empty().wait(k_pipe.phase ^ 1);
        if (with_k)
            smem.k().load<LOAD_UNROLL>(maps.k, work.k_start + work.k0, work.kv, work.entry(),
                                       smem.k_full(), column);
        else
            smem.k_full().arrive();
        smem.storage.work_tile = work;
        smem.k_full().arrive();
        k_pipe.advance();
    };
#pragma unroll 1
    while (get_work(p, claim(), work)) {
        // Skip a block past the end of a shorter sequence, or an index without a head (staggered heads).
        if (work.k0 >= work.Nk(p)) continue;
        wait_for_rows(p, i64(work.b) * p.Hkv + work.kv);
        // The flags do not change while this kernel runs: all work tiles of a head are skipped, or none.
        // LARGE_SCORES heads, alone or with NON_FINITE, go to the generic kernels.
        if ((head_flags(p, work.b, work.kv) & KNOWN) != FLAGGED_HEADS) continue;
        if (work.tiles.is_empty()) {
            publish_work(false);
            continue;
        }
        // Shared memory is occupied until the previous work tile is done, so prefetch to the L2 cache.
        KeyTile::prefetch(maps.k, work.k_start + work.k0, work.kv, work.entry(), column);
        ValueTile::prefetch(maps.v, work.k_start + work.k0, work.kv, work.entry(), v_column);
        const QueryTileList list(p, work);
        bool first = true;
        for_each_index(p, work, [&](int index, int begin, int end) {
            const int q0 = list.tile(index) * BLOCK_Q;
            const i64 row = statistic_index(p, work, begin, q0);
            const float* lse_log2 = static_cast<const float*>(p.lse_log2) + row;
            const float* delta = static_cast<const float*>(p.delta) + row;
#pragma unroll 1
            for (int h = begin; h < end; ++h, lse_log2 += p.rows, delta += p.rows) {
                load_q(h, q0, lse_log2);
                load_dout(h, q0, delta);
                if (first) {
                    first = false;
                    // v is released before k.
                    smem.v_empty().wait(v_pipe.phase ^ 1);
                    smem.v().load<LOAD_UNROLL>(maps.v, work.k_start + work.k0, work.kv,
                                               work.entry(), smem.v_full(), v_column);
                    v_pipe.advance();
                    publish_work(true);
                }
                if (!PACKED) lockstep.advance(p);
            }
        });
    }
    lockstep.end(p);
    work.is_end = true;
    publish_work(false);
}

// The warp that loads the bias of each tile, once all consumers have read the bias of the previous one.
template <class Bias = TileBias>  // a template, so that only kernels that call it compile it
__device__ inline void load_bias(const Params& p, const Smem& smem) {
    const Bias bias(smem.bias());
    const WorkTile& work = smem.storage.work_tile;  // read again for each tile, to save registers
    PipelineState<1> k_pipe, bias_pipe;
#pragma unroll 1
    for (;; k_pipe.advance()) {
        smem.k_full().wait(k_pipe.phase);
        if (work.is_end) break;
        for_each_index(p, work, [&](int index, int begin, int end) {
#pragma unroll 1
            for (int h = begin; h < end; ++h, bias_pipe.advance()) {
                smem.bias_empty().wait(bias_pipe.phase ^ 1);
                bias.load_tile(ScoreMod(p, work.b, h), QueryTileList(p, work).tile(index) * BLOCK_Q,
                               work.k0);
                smem.bias_full().arrive_after_copies();
            }
        });
        smem.k_empty().arrive();  // safe: only generic stores overwrite the work tile
    }
}

// Values of dq_semaphore for a dQ tile that key blocks claim.
constexpr u32 DQ_CLAIMED = 1, DQ_STORED = 2;

// True if the key block that reaches a dQ tile first stores it; otherwise the one with the first keys does.
// With tile lists the block with the first keys may have far more queries than others, which would wait.
__device__ inline bool claims_dq(const Params& p) { return HAS_TILE_LIST && !p.in_order; }

// Wait until this CTA may add to a dQ tile. Returns 0 if it is the first, which stores. `reached` is the
// last value read from the semaphore.
__device__ inline u32 wait_turn(const Params& p, u32* semaphore, u32 reached, u32 rank) {
    u32 before = rank;
    if (claims_dq(p)) {
        before = reached ? reached : claim_semaphore(semaphore, DQ_CLAIMED);
        for (reached = before; reached == DQ_CLAIMED;) reached = read_semaphore(semaphore);
    } else {
        const u32 wanted = p.in_order ? rank : min(rank, 1u);
        while (reached < wanted) reached = read_semaphore(semaphore);
    }
    if (before) fence_async_global();
    return before;
}

// The thread of a dQ store warp: add dQ tiles to device memory, alternating with the other store warp. The
// first of the key blocks that a query tile attends to stores, so memory need not be zeroed; the others
// add.
__device__ inline void store_dq(const Params& p, const Smem& smem, int store_warp) {
    const int rows = int(p.Nq), tiles = block_count<BLOCK_Q>(p, p.Nq);
    // The next copy starts while this one is read. bulk_wait_read makes the arrive safe.
    constexpr int UNREAD = DQ_STAGES > 1 ? 1 : 0;
    PipelineState<1> k_pipe;
    PipelineState<DQ_STAGES> dq_pipe;
    int others = store_warp;  // tiles of the other warp before the next tile of this warp
    auto wait_full = [&](int warpgroup, const PipelineState<DQ_STAGES>& at) {
        // The parity of a full barrier distinguishes only two phases. The previous phase may belong to the
        // other warp, so first wait until that warp has released the stage.
        smem.dq_empty(warpgroup, at.stage).wait(at.phase ^ 1);
        smem.dq_full(warpgroup, at.stage).wait(at.phase);
    };
    auto release = [&](int stages_back) {
        for (int w = 0; w < CONSUMERS; ++w)
            smem.dq_empty(w, (dq_pipe.stage + DQ_STAGES - stages_back) % DQ_STAGES).arrive();
    };
#pragma unroll 1
    for (;; k_pipe.advance()) {
        smem.k_full().wait(k_pipe.phase);
        const WorkTile work = smem.storage.work_tile;
        smem.k_empty().arrive();  // safe: only generic stores overwrite the work tile
        if (work.is_end) break;
        const u32 first_head = work.entry() * int(p.Hq);
        const QueryTileList list(p, work);
        for_each_index(p, work, [&](int index, int begin, int end) {
            const int tile = list.tile(index);
            const u32 rank = claims_dq(p) ? 0 : list.rank(p, work, index);
#pragma unroll 1
            for (u32 head = first_head + begin; head < first_head + end; ++head) {
                if (others) {
                    --others, dq_pipe.advance(DQ_COPIES);
                    continue;
                }
                others = DQ_STORE_WARPS - 1;
                u32* const semaphore = p.dq_semaphore + (head * tiles + work.first_tile() + tile);
                u32 reached = 0;
                // Claim a dQ tile only when all of its copies are staged. A warp that claims must store
                // without waiting: other CTAs spin on the claim, and the sibling store warp may hold a
                // stage that this warp would wait for. That would be a deadlock.
                if (claims_dq(p)) {
                    reached = read_semaphore(semaphore);
                    PipelineState<DQ_STAGES> copy = dq_pipe;
#pragma unroll 1
                    for (int n = 0; n < min(DQ_COPIES, DQ_STAGES); ++n, copy.advance())
                        for (int w = 0; w < CONSUMERS; ++w) wait_full(w, copy);
                }
                const u32 before = wait_turn(p, semaphore, reached, rank);
#pragma unroll 1
                for (int n = 0; n < DQ_COPIES; ++n) {
#pragma unroll(HAS_TILE_LIST ? 1 : CONSUMERS)
                    for (int w = 0; w < CONSUMERS; ++w) {
                        const DqShare share = dq_share(w);
                        const int row0 = tile * BLOCK_Q + share.row;
                        const int count = max(0, min(DQ_ROWS, work.Nq(p) - row0));
                        float* const dq_accum = static_cast<float*>(p.dq_accum) +
                                                u64(head * rows + work.q_start + row0) * DQ_DIM;
                        const int column = share.at(n * DQ_COPY_COLUMNS);
                        wait_full(w, dq_pipe);
                        if (const int columns = count ? dq_copy_columns(column) : 0)
                            bulk_store(dq_accum + count * column, smem.dq(w, dq_pipe.stage),
                                       4 * count * columns, before > 0);
                    }
                    bulk_commit();
                    dq_pipe.advance();
                    bulk_wait_read<UNREAD>();
                    if (n >= UNREAD) release(UNREAD + 1);
                }
                if (UNREAD) bulk_wait_read<0>(), release(1);
                if (p.in_order || !before)
                    bulk_wait(), publish_semaphore(semaphore, claims_dq(p) ? DQ_STORED : rank + 1);
            }
        });
        bulk_wait();
        count_dq(p, work.b, work.kv, DQ_COUNT / DQ_STORE_WARPS);
    }
}

// Pass a warpgroup's part of dQ to a store warp, some columns at a time.
template <int NT>
__device__ inline void publish_dq(const Smem& smem, int warpgroup,
                                  const Fragment<Accum, 1, NT>& dq, int row0,
                                  PipelineState<DQ_STAGES>& dq_pipe) {
#pragma unroll
    for (int column = 0; column < (DQ_IS_TRANSPOSED ? 1 : 8 * NT);
         column += DQ_COPY_COLUMNS, dq_pipe.advance()) {
        smem.dq_empty(warpgroup, dq_pipe.stage).wait(dq_pipe.phase ^ 1);
        const u32 target = smem.dq(warpgroup, dq_pipe.stage);
        if constexpr (DQ_IS_TRANSPOSED)
            stage_transposed_dq(target, dq, row0, dq_copy_columns(DQ_COPY_COLUMNS * warpgroup));
        else
            stage_dq<DQ_COPY_COLUMNS>(target, dq, column, row0);
        fence_async_shared();
        smem.dq_full(warpgroup, dq_pipe.stage).arrive();
    }
}

// Zero keys and values of a work tile that no query attends to: past the length, outside all windows, or in
// the next sequence. NaN or infinity there would make gradients NaN. v has landed when the phase of v_full
// with this parity ends.
__device__ inline void zero_unattended(const Params& p, const Smem& smem, const WorkTile& work,
                                       u32 parity) {
    const Range attended = work.window.key_range(0, work.window.Nq);
    const int begin = attended.lo - work.k0, end = attended.hi - work.k0;
    // TMA has zeroed rows past the end of the array.
    const bool unattended_after = end < BLOCK_K && attended.hi + work.k_start < p.Nk;
    if (!__any_sync(~0u, begin > 0 || unattended_after)) return;
    smem.v_full().wait(parity);
    const u32 zeros[4] = {};
    auto zero = [&](const auto& tile, int columns) {
        const int chunks = columns / 8;
#pragma unroll 1
        for (int i = threadIdx.x; i < BLOCK_K * chunks; i += CONSUMER_THREADS) {
            const int row = i / chunks;
            if (row < begin || row >= end) store_shared(tile.chunk(row, i % chunks * 16), zeros);
        }
    };
    zero(smem.k(), tile_columns(HEAD_COLUMNS));
    zero(smem.v(), tile_columns(VALUE_COLUMNS));
    fence_async_shared();
    sync_consumers();
}

// Zero the rows of a tile of q or dO past the end of a packed sequence. They belong to the next sequence,
// and a NaN there must not spread. Each warpgroup does this for its own GEMMs without waiting for the
// others, which store the same zeros. The fence orders the stores before the next TMA load into the stage.
template <int COLUMNS, class Tile>
__device__ inline void zero_past_end(const Params& p, const Tile& tile, const WorkTile& work,
                                     int q0, int warpgroup) {
    if constexpr (PACKED && !NAN_SAFE) {
        const int rows = work.Nq(p) - q0;
        if (!__any_sync(~0u, rows < BLOCK_Q)) return;
        constexpr int CHUNKS = tile_columns(COLUMNS) / 8;
        const u32 zeros[4] = {};
#pragma unroll 1
        for (int i = rows * CHUNKS + threadIdx.x % WARPGROUP; i < BLOCK_Q * CHUNKS; i += WARPGROUP)
            store_shared(tile.chunk(unswapped<BLOCK_Q>(i / CHUNKS), i % CHUNKS * 16), zeros);
        fence_async_shared();
        sync_warpgroup(warpgroup);
    }
}

// True if the mask masks out some pair of the query tile with this index.
__device__ inline bool is_partial(const WorkTile& work, const QueryTileList& list, int index) {
    return list.is_partial(index) || work.tiles.is_partial(list.tile(index));
}

// Call step(partial, more) for each query tile and head of a work tile that is not empty, in the order of
// for_each_index. With SKIP_FIRST the caller has done the first step. With PEEL_LAST `more` is false for
// the last step.
template <bool SKIP_FIRST, bool PEEL_LAST, class Step>
__device__ __forceinline__ void for_each_tile(const Params& p, const WorkTile& work, int& h, int& tile,
                                              Step step) {
    const QueryTiles& tiles = work.tiles;
    const QueryTileList list(p, work);
    const int end_head = work.end_head(p);
    bool partial = false;
    for_each_index(p, work, [&](int index, int begin, int end) {
        tile = list.tile(index);
        partial = is_partial(work, list, index);
        end -= PEEL_LAST && end == end_head && tiles.next(index) == tiles.stop;
        if constexpr (NAN_SAFE) {  // one copy of the step, which compiles faster
            const bool any = __any_sync(~0u, partial);
#pragma unroll 1
            for (h = begin; h < end; ++h) step(any, true);
        } else if (partial) {
#pragma unroll 1
            for (h = begin; h < end; ++h) step(true, true);
        } else {
#pragma unroll 1
            for (h = begin; h < end; ++h) step(false, true);
        }
    }, SKIP_FIRST);
    if constexpr (PEEL_LAST) {
        h = end_head - 1;
        step(partial, false);
    }
}

// --- epilogue ------------------------------------------------------------------------------------

// Join the sums of this warp with the same rows of all splits of the key block. Returns true if they are
// complete: then this warp stores them.
template <class... Sums>
__device__ inline bool join_splits(const Params& p, const WorkTile& work, Sums&... sums) {
    if constexpr (SPLIT_Q) {
        const i64 head = i64(work.b) * p.Hkv + work.kv;
        auto any = [](bool holds) {
            __syncwarp();
            return bool(__any_sync(~0u, holds));
        };
        return split_team<CONSUMERS * WARPGROUP / WARP>(
                   p, head * block_count<BLOCK_K>(p, p.Nk) + work.k0 / BLOCK_K, work.split,
                   threadIdx.x / WARP, threadIdx.x % WARP, any)
            .join(sums...);
    }
    return true;
}

template <int NT>
__device__ inline void flag_non_finite(const Params& p, const WorkTile& work,
                                       const Fragment<Accum, 1, NT>& acc) {
    if (!NAN_SAFE && !acc.all_finite()) fail_head(p, work.b, work.kv);
}

// Store 16 rows of each warp to dK or dV. Narrow heads stage them in a stage of dS that is no longer read;
// wide heads and those in halves have no such stage.
template <int NT>
__device__ inline void store_gradient(const Params& p, const Smem& smem, void* target,
                                      const Rows& at, int columns, const WorkTile& work, int row0,
                                      const Fragment<Accum, 1, NT>& acc,
                                      const PipelineState<DS_STAGES>& ds_pipe) {
    const int row = work.k0 + row0;
    if constexpr (IS_WIDE || IN_HALVES) {
        const int column = own_half() * 8 * NT;
        store_rows(rows_of<Element>(target, at, work.entry(), work.kv) +
                       (work.k_start + row) * at.n + column,
                   at.n, acc, work.Nk(p) - row, columns - column);
    } else {
        smem.ds_empty(ds_pipe.stage).wait(ds_pipe.phase ^ 1);
        store_rows_staged(smem.staging(ds_pipe.stage),
                          rows_of<Element>(target, at, work.entry(), work.kv) +
                              (work.k_start + row) * at.n,
                          at.n, acc, work.Nk(p) - row, columns);
    }
}

// --- entry ---------------------------------------------------------------------------------------

// The body of a backward kernel. Consumer warpgroups call consume(smem, warpgroup).
template <class Consume>
__device__ __forceinline__ void run_backward(const Params& p, const BackwardMaps& maps, Consume consume) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage;
    const Smem smem{tensors, shared_address(tensors), storage};
    const int warpgroup = warpgroup_index();
    set_up(smem, maps.k, maps.q, maps.v, maps.dout);
    if constexpr (PACKED || NAN_SAFE || SPLIT_FLOATS)
        wait_for_prerequisites();
    else
        pass_kernel_before();
    // The next kernel starts on SMs that have no work tile left.
    launch_dependents();
    if (NAN_SAFE && !any_flagged_head(p)) return;
    __syncthreads();
    sync_pair();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<PRODUCER_REGISTERS>();
        // Branch by uniform warp number: divergent branches would need more registers than there are.
        const int warp = uniform(threadIdx.x / WARP);
        if constexpr (BIAS_IS_LOADED)
            if (warp > WARPS_M + DQ_STORE_WARPS) return load_bias(p, smem);
        if (warp == WARPS_M) {
            if (is_first_lane()) produce(p, maps, smem), wait_for_prerequisites();
            return;
        }
        if (threadIdx.x % WARP) return;
        if (!IS_WIDE && warp <= WARPS_M + DQ_STORE_WARPS)
            store_dq(p, smem, warp - WARPS_M - 1);
    } else {
        reg_alloc<CONSUMER_REGISTERS>();
        consume(smem, warpgroup);
        sync_pair();
    }
}
