// Layer 3. ds_tiles.cuh for Hopper, with TMA, wgmma and warp specialisation: a producer thread loads the
// operands of each step, and the softmax of one warpgroup overlaps with the GEMMs of the other.
#pragma once

#include "ds_steps.cuh"
#include "gemm_sm90.cuh"
#include "gradient.cuh"
#include "warpgroups_sm90.cuh"

static_assert(BLOCK_Q == WARPGROUP_ROWS * CONSUMERS && WARPS_N == 1, "64 queries a warpgroup");

using QueryTile = SmemTile<BLOCK_Q, HEAD_DIM>;
using KeyTile = SmemTile<BLOCK_K, HEAD_DIM>;
using DoutTile = SmemTile<BLOCK_Q, VALUE_DIM>;
using ValueTile = SmemTile<BLOCK_K, VALUE_DIM>;
constexpr int BIAS_AT = QueryTile::BYTES + KeyTile::BYTES + DoutTile::BYTES + ValueTile::BYTES;
constexpr int DS_BYTES = BIAS_AT + WarpBias<false, MT, NT, true>::BYTES;  // of dynamic shared memory

// Static shared memory.
struct SharedStorage {
    u64 keys_full, keys_empty, values_full, values_empty;
};

struct Smem {
    char* memory;
    SharedStorage& storage;

    __device__ QueryTile q() const { return {shared_address(memory)}; }
    __device__ KeyTile k() const { return {q().address + QueryTile::BYTES}; }
    __device__ DoutTile dout() const { return {k().address + KeyTile::BYTES}; }
    __device__ ValueTile v() const { return {dout().address + DoutTile::BYTES}; }
    __device__ Barrier keys_full() const { return {shared_address(&storage.keys_full)}; }
    __device__ Barrier keys_empty() const { return {shared_address(&storage.keys_empty)}; }
    __device__ Barrier values_full() const { return {shared_address(&storage.values_full)}; }
    __device__ Barrier values_empty() const { return {shared_address(&storage.values_empty)}; }

    // One thread initialises the barriers.
    __device__ void init() const {
        keys_full().init(2), keys_empty().init(CONSUMERS);
        values_full().init(2), values_empty().init(CONSUMERS);
        fence_barrier_init();
    }
};

// The producer thread.
struct DsProducer {
    const Params& p;
    const BackwardMaps& maps;
    const Smem smem;
    PipelineState<1> pipe;
    i64 row = -1;  // the row of tiles whose q and dO are in shared memory

    // Load the operands of the steps. q and dO stay for a whole row of tiles.
    __device__ void load(Steps step) {
#pragma unroll 1
        for (; !step.done; step.next(), pipe.advance()) {
            const Sequence& sequence = step.sequence;
            const int b = int(sequence.entry()), h = step.h.at;
            const int q0 = int(sequence.q_start) + step.q0();
            const int k0 = int(sequence.k_start) + step.k0();
            const bool stays = step.row() == row;
            row = step.row();
            smem.keys_empty().wait(pipe.phase ^ 1);
            smem.k().load(maps.k, k0, step.key_head, b, smem.keys_full());
            if (stays)
                smem.keys_full().arrive();
            else
                smem.q().load(maps.q, q0, h, b, smem.keys_full());
            smem.values_empty().wait(pipe.phase ^ 1);
            smem.v().load(maps.v, k0, step.key_head, b, smem.values_full());
            if (stays)
                smem.values_full().arrive();
            else
                smem.dout().load(maps.dout, q0, h, b, smem.values_full());
        }
    }
};

// A consumer warpgroup.
struct DsConsumer {
    const Params& p;
    const Smem smem;
    PipelineState<1> pipe;

    // Call sum(ds, b, h) for the dS of each step, which is 0 past the last query.
    template <class Sum>
    __device__ __forceinline__ void for_each_ds(Steps step, Sum sum) {
        const WarpBias<false, MT, NT, true> bias(smem.memory + BIAS_AT);
        const int row0 = first_row(), m0 = row0 / WARPGROUP_ROWS * WARPGROUP_ROWS;
        const bool leader = threadIdx.x % WARPGROUP == 0;
        const Lane lane;
        bool has_bias = false;
        auto load_bias = [&] {
            if (step.done || (has_bias && step.one_bias())) return;
            has_bias = true;
            bias.load(ScoreMod(p, step.b.at, step.h.at), step.q0() + row0, step.k0());
        };

        // Statistics and flags of a step are loaded during the previous one.
        auto statistic = [&](const void* all, i64 first, int e) {
            return static_cast<const Accum*>(all)[first + lane.row(e)];
        };
        Accum next_lse_log2[2], next_delta[2];
        u32 next_flags;
        auto load_rows = [&] {
            if (step.done) return;
            next_flags = head_flags(p, step.b.at, step.key_head);
            const i64 first = step.row() + row0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                next_lse_log2[half] = statistic(p.lse_log2, first, 2 * half);
                next_delta[half] = statistic(p.delta, first, 2 * half);
            }
        };

        load_bias();
        load_rows();
#pragma unroll 1
        for (; !step.done; pipe.advance()) {
            const int b = step.b.at, h = step.h.at, q0 = step.q0(), Nq = int(step.sequence.Nq);
            const i64 first = step.row() + row0;
            const Accum lse_log2[2] = {next_lse_log2[0], next_lse_log2[1]};
            const Accum delta[2] = {next_delta[0], next_delta[1]};
            const u32 flags = next_flags;
            const AttentionMask attn_mask(p, b, h);
            TileGradient<false, MT, NT, true> tile(q0 + row0, step.k0());
            tile.load_mask(attn_mask);

            smem.keys_full().wait(pipe.phase);
            gemm_async<Element, HEAD_DIM>(tile.p, smem.q(), m0, smem.k());
            warpgroup_wait<0>(tile.p);
            // Safe: only GEMMs read q and k, and this warpgroup's is complete.
            if (leader) smem.keys_empty().arrive();
            copy_wait<0>();
            __syncwarp();  // the bias has landed
            tile.recompute_p(
                ScoreMod(p, b, h), bias, attn_mask, Dropout(p, b, h), step.kind,
                flags & LARGE_SCORES,
                [&](int, int, int e) { return statistic(p.row_max, first, e); },
                [&](int, int, int e) { return lse_log2[e / 2]; });
            step.next();
            load_bias();
            load_rows();

            smem.values_full().wait(pipe.phase);
            gemm_async<Element, VALUE_DIM>(tile.ds, smem.dout(), m0, smem.v());
            warpgroup_wait<0>(tile.ds);
            if (leader) smem.values_empty().arrive();  // safe, like q and k
            tile.compute_ds(Accum(p.dropout_scale), [&](int, int, int e) { return delta[e / 2]; });
            // Queries past the end may attend to a non-finite key that is masked out for all other queries.
            if (q0 + BLOCK_Q > Nq)
                tile.ds.for_each(
                    [&](Accum& x, int i, int, int, int, int) { x = i < Nq ? x : Accum(0); });
            sum(tile.ds, b, h);
        }
    }
};

// Call produce(producer) in one thread, and consume(consumer) in the consumer warpgroups.
template <class Produce, class Consume>
__device__ __forceinline__ void run_ds(const Params& p, const BackwardMaps& maps, char* memory,
                                       Produce produce, Consume consume) {
    __shared__ SharedStorage storage;
    const Smem smem{memory, storage};
    const int warpgroup = warpgroup_index();
    if (threadIdx.x == 0) smem.init();
    wait_for_prerequisites();
    __syncthreads();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == THREADS) {
            DsProducer producer{p, maps, smem};
            produce(producer);
        }
    } else {
        reg_alloc<CONSUMER_REGISTERS>();
        DsConsumer consumer{p, smem};
        consume(consumer);
    }
}
