// Forward pass for head dimensions above 256 on Hopper: a cluster of two CTAs computes 128 queries. The
// accumulators of 128 rows and 512 columns would fill all registers of an SM, so each CTA has half of the
// columns of O. Each also computes the scores of half of the keys of a tile, over all columns of q and k.
// The CTAs exchange row maxima, so both subtract the same shifts, and P. So nothing is computed twice, and
// each key and value is loaded by one CTA only.
//
// A producer warp loads keys and values into one circular buffer, in the order of use. Two consumer
// warpgroups have 64 rows each.
#include "naive.cuh"
#include "tile_scheduler.cuh"
#include "wide_smem_sm90.cuh"

// The queries of a pair of CTAs, and the key tiles that they attend to.
struct WorkTile {
    int b, h, q0, begin, end;
    Sequence sequence;
    SlidingWindow window;

    __device__ WorkTile(const Params& p, const HeadBlock<BLOCK_Q>& at)
        : b(at.b), h(at.h), q0(at.block * BLOCK_Q), sequence(p, b), window(p, sequence) {
        const Range keys = window.key_range(q0, min(q0 + BLOCK_Q, int(sequence.Nq)));
        begin = keys.lo / BLOCK_K, end = (keys.hi + BLOCK_K - 1) / BLOCK_K;
    }
    __device__ explicit WorkTile(const Params& p) : WorkTile(p, block_of(p)) {}

    // Longest first: with a causal mask the last queries have most keys.
    __device__ static HeadBlock<BLOCK_Q> block_of(const Params& p) {
        const int blocks = block_count<BLOCK_Q>(p, p.Nq);
        const BlockCoord coord(blocks, int(p.B * p.Hq), int(p.head_groups));
        const int number = p.right < 0 ? coord.block : blocks - 1 - coord.block;
        return {p, p.query_ends(), int(p.Hq), coord.head, number};
    }
    __device__ bool is_missing() const { return PACKED && q0 >= sequence.Nq; }
    // The first key of a tile whose scores a CTA computes.
    __device__ static int first_key(int tile, int rank) { return tile * BLOCK_K + rank * OWN_KEYS; }
};

// The first key of a part of the values. The keys whose P the other CTA has computed come first.
__device__ inline int value_part(int tile, int part, int rank) {
    constexpr int HALF = VALUE_PARTS / 2;
    return WorkTile::first_key(tile, part < HALF ? 1 - rank : rank) + part % HALF * PART_KEYS;
}

// The producer thread. Keys are a tile ahead of values.
__device__ inline void produce(const Params& p, const ForwardMaps& maps, const Smem& smem,
                               const WorkTile& work, int rank) {
    const int entry = int(work.sequence.entry()), kv = work.h / int(p.group);
    const int q_start = int(work.sequence.q_start) + work.q0, k_start = int(work.sequence.k_start);
    PipelineState<STAGES> pipe;
    auto load_keys = [&](int tile) {
        const int row = k_start + WorkTile::first_key(tile, rank);
#pragma unroll 1
        for (int part = 0; part < KEY_PARTS; ++part, pipe.advance()) {
            const Barrier full = smem.full(pipe.stage);
            const int slices = part_columns(part) / KeyTile::WIDTH;
            smem.empty(pipe.stage).wait(pipe.phase ^ 1);
            full.arrive_and_expect_tx(slices * KeyTile::SLICE);
#pragma unroll 1
            for (int n = 0; n < slices; ++n)
                tma_load(smem.slot(pipe.stage) + n * KeyTile::SLICE, maps.k,
                         part * PART_COLUMNS + n * KeyTile::WIDTH, row, kv, entry, full);
        }
    };
    auto load_values = [&](int tile) {
#pragma unroll 1
        for (int part = 0; part < VALUE_PARTS; ++part, pipe.advance()) {
            const Barrier full = smem.full(pipe.stage);
            smem.empty(pipe.stage).wait(pipe.phase ^ 1);
            full.arrive_and_expect_tx(ValueTile::BYTES);
#pragma unroll 1
            for (int n = 0; n < ValueTile::SLICES; ++n)
                tma_load(smem.slot(pipe.stage) + n * ValueTile::SLICE, maps.v,
                         rank * VALUE_COLUMNS + n * ValueTile::WIDTH,
                         k_start + value_part(tile, part, rank), kv, entry, full);
        }
    };
#pragma unroll 1
    for (int n = 0; n < CONSUMERS; ++n)
        smem.q(n).load<1>(maps.q, q_start + n * WARPGROUP_ROWS, work.h, entry, smem.q_full());
#pragma unroll 1
    for (int tile = work.begin - 1; tile < work.end; ++tile) {
        if (tile + 1 < work.end) load_keys(tile + 1);
        if (tile >= work.begin) load_values(tile);
    }
}

// A warp releases a slot, or P of the other CTA. Its part of the GEMMs that read it is complete.
__device__ inline void release(const Barrier& empty) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) empty.arrive();
}

// Store 16 rows of each warp that need no repair, and their lse. Returns the rows of this lane that need
// one, a bit each: their output is not finite although their denominator is. Such a row attends to an
// infinity with P = 0, or a tile has a non-finite value to which only other rows attend. Both CTAs agree.
__device__ inline u32 store(const Params& p, const WorkTile& work, int rank, int row0,
                            const PairedWarp& group, RowState<1>& state, Fragment<Accum, 1, VT>& acc) {
    const Lane lane;
    Accum bad[1][2], weights[2], lse[2];
    u32 repairs = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        bool finite = true;
#pragma unroll
        for (int n = 0; n < VT; ++n)
            finite = finite && is_finite(acc.x[0][n][2 * half]) && is_finite(acc.x[0][n][2 * half + 1]);
        bad[0][half] = !finite;
    }
    group.all_reduce(bad, [](Accum x, Accum y) { return fmax(x, y); });
    state.reduce_sums(group);
    arrive_at_peer();  // this CTA sends nothing more
    const Accum sink = sink_of(p, work.h);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (bad[0][half] != 0 && is_finite(state.l[0][half])) repairs |= 1u << half;
        weights[half] = state.finalize<true>(0, half, sink, Accum(1), Accum(p.softmax_scale), lse[half]);
    }
    acc.scale_rows(0, weights);
    const int first = work.q0 + row0, rows = int(work.sequence.Nq) - first;
    Accum* const lse_to = static_cast<Accum*>(p.lse) + work.sequence.row(p, work.h) + first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane.row(2 * half);
        if (rank == 0 && lane.t == 0 && row < rows && !(repairs >> half & 1)) lse_to[row] = lse[half];
    }
    const int column = rank * VALUE_COLUMNS;
    Element* const to = work.sequence.queries<Element>(p.out, p.out_at, work.h) + first * p.out_at.n;
    store_rows(to + column, p.out_at.n, acc, rows, int(p.Dv) - column, ~repairs);
    return repairs;
}

// A consumer warpgroup: softmax of tile j overlaps PV of tile j - 1.
__device__ __forceinline__ void consume(const Params& p, const Smem& smem, const WorkTile& work,
                                        int warpgroup, int rank) {
    const RowGroup rows(16);
    const int row0 = rows.row0, q0 = work.q0 + warpgroup * WARPGROUP_ROWS;
    const PairedWarp group(smem);
    const QueryTile q = smem.q(warpgroup);
    const ProbTile peer_probs = smem.p(warpgroup);
    const Accum softmax_scale_log2 = ScoreMod(p, work.b, work.h).softmax_scale_log2();
    PipelineState<STAGES> pipe;
    u32 p_phase = 0;
    Scores<false, 1, NT> s(0, 0);
    Atom<Element>::A probs[OWN_KEYS / 16];  // P of the own keys
    Fragment<Accum, 1, VT> acc;
    RowState<1> state;
    Accum rescale[1][2];
    acc.clear();

    auto release_slot = [&](int before) {  // the slot that many parts before this one
        const int stage = pipe.stage - before;
        release(smem.empty(stage < 0 ? stage + STAGES : stage));
    };
    // Issue S = Q K^T. All parts of the keys but the last are released. `beside` is called once the first
    // GEMM is issued.
    auto issue_qk = [&](auto beside) {
        auto& d = accum_registers(s);
        discard_operand(d);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < KEY_PARTS; ++part, pipe.advance()) {
            smem.full(pipe.stage).wait(pipe.phase);
            const KeyTile k{smem.slot(pipe.stage)};
#pragma unroll
            for (int at = 0; at < part_columns(part); at += 16)
                wgmma(Element{}, d, q.k_major(0, part * PART_COLUMNS + at), k.k_major(0, at),
                      part > 0 || at > 0);
            wgmma_commit();
            if (part == 0) {
                beside();
            } else {
                wgmma_wait<1>();
                release_slot(1);
            }
        }
    };
    // Wait for P of the other CTA.
    auto receive_p = [&] {
        if (threadIdx.x % WARPGROUP == 0) smem.p_full(warpgroup).arrive_and_expect_tx(ProbTile::BYTES);
        smem.p_full(warpgroup).wait(p_phase);
        fence_async_shared();  // st.async is generic, wgmma is not
        p_phase ^= 1;
    };
    // Issue O += P V for some parts of the values, a group of GEMMs for each.
    auto issue_pv = [&](int begin, int end) {
        auto& d = accum_registers(acc);
        fence_operand(d);
        wgmma_fence();
#pragma unroll
        for (int part = begin; part < end; ++part, pipe.advance()) {
            smem.full(pipe.stage).wait(pipe.phase);
            const ValueTile v{smem.slot(pipe.stage)};
#pragma unroll
            for (int k = 0; k < PART_KEYS; k += 16) {
                const int own = part * PART_KEYS + k - OWN_KEYS;
                if (own < 0)
                    wgmma(Element{}, d, peer_probs.k_major(0, part * PART_KEYS + k), v.mn_major(k), true);
                else
                    wgmma(Element{}, d, probs[own / 16].r, v.mn_major(k), true);
            }
            wgmma_commit();
        }
    };
    // Release a quarter of the values, once all parts are issued.
    constexpr int QUARTER = VALUE_PARTS / 4;
    auto release_quarter = [&](int quarter) {
#pragma unroll
        for (int part = 0; part < QUARTER; ++part) release_slot(VALUE_PARTS - quarter * QUARTER - part);
    };
    // Issue the second half of PV, for P of the own keys. The first quarter of the values is released.
    auto issue_own_pv = [&] {
        issue_pv(VALUE_PARTS / 2, VALUE_PARTS);
        wgmma_wait<3 * QUARTER>();
        release_quarter(0);
    };
    // Wait for PV, and release the other values and P of the other CTA as they have been read.
    auto finish_pv = [&] {
        wgmma_wait<2 * QUARTER>();
        release_quarter(1);
        if (threadIdx.x % WARP == 0) arrive_at_peer(peer_address(smem.p_empty(warpgroup).address));
        wgmma_wait<QUARTER>();
        release_quarter(2);
        warpgroup_wait<0>(acc);
        release_quarter(3);
    };
    // Zero the values of the last tile that are past the end of the keys. P is 0 there, but 0 x NaN is NaN,
    // and the tail of a cache may hold anything. TMA has zeroed values past the end of the array. Each
    // warpgroup does this for its own GEMM; the other one stores the same zeros.
    auto zero_past_end = [&] {
        const int tile = work.end - 1, length = work.window.length;
        const bool is_array_end = work.sequence.k_start + length >= p.Nk;
        if (!__any_sync(~0u, work.end * BLOCK_K > length && !is_array_end)) return;
        constexpr int CHUNKS = VALUE_COLUMNS / 8;
        const int thread = threadIdx.x % WARPGROUP;
        const u32 zeros[4] = {};
        PipelineState<STAGES> at = pipe;
#pragma unroll 1
        for (int part = 0; part < VALUE_PARTS; ++part, at.advance()) {
            const ValueTile v{smem.slot(at.stage)};
            const int begin = max(0, length - value_part(tile, part, rank));
            smem.full(at.stage).wait(at.phase);
#pragma unroll 1
            for (int i = begin * CHUNKS + thread; i < PART_KEYS * CHUNKS; i += WARPGROUP)
                store_shared(v.chunk(i / CHUNKS, i % CHUNKS * 16), zeros);
        }
        fence_async_shared();
        sync_warpgroup(warpgroup);
    };
    // `beside` is called while the row maxima are on their way.
    auto softmax = [&](int tile, auto beside) {
        const int k0 = WorkTile::first_key(tile, rank);
        const ScoreMod score_mod(p, work.b, work.h);
        const AttentionMask attn_mask(p, work.sequence, work.window, work.h);
        s.row = work.q0 + row0, s.column = k0;
        s.apply(score_mod, WarpBias<false, 1, NT>(nullptr), [](int, int, int, Accum, Accum) {});
        if (!work.window.is_full(q0, q0 + WARPGROUP_ROWS, k0, k0 + OWN_KEYS))
            s.masked_fill_positions(attn_mask);
        state.update<RESCALE_THRESHOLD, RowMaxMode::DETECT>(
            s, softmax_scale_log2, PairedWarpBeside{group, beside}, rescale);
    };
    auto convert_p = [&] {
#pragma unroll
        for (int i = 0; i < OWN_KEYS / 16; ++i) probs[i] = Atom<Element>::a_of(s.x[0] + 2 * i);
    };
    // The other CTA has consumed P of the previous tile.
    auto send_p = [&] {
        smem.p_empty(warpgroup).wait(p_phase ^ 1);
        send_probs(peer_probs, smem.p_full(warpgroup), probs);
    };

    smem.q_full().wait(0);
    if (work.begin < work.end) {
        issue_qk([] {});
        warpgroup_wait<0>(s);
        release_slot(1);
        softmax(work.begin, [] {});
        convert_p();
#pragma unroll 1
        for (int tile = work.begin + 1; tile < work.end; ++tile) {
            issue_qk(send_p);
            acc.scale_rows(rescale);
            receive_p();
            issue_pv(0, VALUE_PARTS / 2);
            warpgroup_wait<VALUE_PARTS / 2>(s);
            release_slot(VALUE_PARTS / 2 + 1);
            softmax(tile, issue_own_pv);
            order_after(state.l[0][0] + state.l[0][1] < 0);
            finish_pv();
            convert_p();
        }
        send_p();
        zero_past_end();
        acc.scale_rows(rescale);
        receive_p();
        issue_pv(0, VALUE_PARTS / 2);
        issue_own_pv();
        finish_pv();
    }
    const u32 repairs = store(p, work, rank, row0, group, state, acc);
    // Each CTA repairs one of a lane's two rows.
    for (u32 left = __ballot_sync(~0u, Lane().t == 0 && (repairs >> rank & 1)); left; left &= left - 1) {
        const int row = work.q0 + row0 + rank * 8 + (__ffs(left) - 1) / 4;
        if (row < work.sequence.Nq) forward_row(p, work.b, work.h, row);
    }
    wait_for_peer();  // the other CTA sends nothing more
}

extern "C" __global__ void CLUSTER __launch_bounds__((WARPGROUPS + 1) * WARPGROUP, 1)
    forward_wide_sm90(const __grid_constant__ Params p, const __grid_constant__ ForwardMaps maps) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage;
    const Smem smem{shared_address(tensors), storage};
    const int warpgroup = warpgroup_index(), rank = int(cluster_rank());
    set_up(smem, maps.k, maps.q, maps.v);
    wait_for_prerequisites();
    const WorkTile work(p);
    if (work.is_missing()) return;
    arrive_at_peer();
    wait_for_peer();  // the barriers of both CTAs are initialised
    if (warpgroup == CONSUMERS) {
        reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x < CONSUMER_THREADS + WARP && is_first_lane()) produce(p, maps, smem, work, rank);
        return;
    }
    reg_alloc<CONSUMER_REGISTERS>();
    consume(p, smem, work, warpgroup, rank);
}
