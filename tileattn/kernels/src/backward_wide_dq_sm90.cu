// Backward pass for q on Hopper, for head dimensions above 128: a producer thread loads keys and
// values in turn into one circular buffer, and two consumer warpgroups have dQ of 64 queries each in
// registers. So nothing is added in device memory, and the order of the sums is fixed.
#include "gemm_sm90.cuh"
#include "gradient.cuh"
#include "tile_scheduler_sm90.cuh"

constexpr int WARPGROUP = 4 * WARP;     // threads
constexpr int CONSUMERS = WARPS_M / 4;  // consumer warpgroups
constexpr int WARPGROUP_ROWS = 64;      // queries of each
static_assert(BLOCK_Q == WARPGROUP_ROWS * CONSUMERS && WARPS_N == 1, "64 queries a warpgroup");
static_assert(PRODUCER_WARPS == 4, "setmaxnreg takes a whole warpgroup");
static_assert(STAGES >= 3, "the next k is read before this one is released");

// Registers of a thread: the producer warpgroup gives its own to the consumers.
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
constexpr int TURN_BARRIER = CONSUMER_BARRIER + 1;  // one for each warpgroup
constexpr int NT = BLOCK_K / 8, DT = HEAD_DIM / 8;

using WorkTile = FwdWorkTile;
using QueryTile = SmemTile<WARPGROUP_ROWS, HEAD_DIM>;  // of one warpgroup
using DoutTile = SmemTile<WARPGROUP_ROWS, VALUE_DIM>;
using KeyTile = SmemTile<BLOCK_K, HEAD_DIM>;
using ValueTile = SmemTile<BLOCK_K, VALUE_DIM>;

// Dynamic shared memory, as it lies: queries and dO of each warpgroup, then the stages.
constexpr int STAGE_BYTES = KeyTile::BYTES > ValueTile::BYTES ? KeyTile::BYTES : ValueTile::BYTES;
constexpr int ROWS_BYTES = QueryTile::BYTES + DoutTile::BYTES;
static_assert(CONSUMERS * ROWS_BYTES + STAGES * STAGE_BYTES == SHARED_BYTES, "what a launch brings");

struct Maps {
    TensorMap q, k, v, dout;
};

// Static shared memory.
struct SharedStorage {
    u64 q_full[CONSUMERS], q_empty[CONSUMERS], full[STAGES], empty[STAGES];
    WorkTile work_tiles[CONSUMERS];
};

struct Smem {
    u32 tensors;  // address of dynamic shared memory
    SharedStorage& storage;

    __device__ QueryTile q(int warpgroup) const { return {tensors + warpgroup * ROWS_BYTES}; }
    __device__ DoutTile dout(int warpgroup) const {
        return {q(warpgroup).address + QueryTile::BYTES};
    }
    __device__ u32 stage(int stage) const {
        return tensors + CONSUMERS * ROWS_BYTES + stage * STAGE_BYTES;
    }
    __device__ KeyTile k(int at) const { return {stage(at)}; }
    __device__ ValueTile v(int at) const { return {stage(at)}; }

    __device__ Barrier q_full(int warpgroup) const {
        return {shared_address(storage.q_full + warpgroup)};
    }
    __device__ Barrier q_empty(int warpgroup) const {
        return {shared_address(storage.q_empty + warpgroup)};
    }
    __device__ Barrier full(int stage) const { return {shared_address(storage.full + stage)}; }
    __device__ Barrier empty(int stage) const { return {shared_address(storage.empty + stage)}; }

    // By one thread, before all others. A q_full expects q and dO.
    __device__ void init() const {
        for (int g = 0; g < CONSUMERS; ++g) q_full(g).init(2), q_empty(g).init(WARPGROUP);
        for (int s = 0; s < STAGES; ++s) full(s).init(1), empty(s).init(CONSUMERS);
        fence_barrier_init();
    }
};

// Claims work tiles, the longest first.
struct ClaimOrder {
    static constexpr int iteration = 0;

    __device__ int next(const Params& p) {
        return int(__shfl_sync(1, atomicAdd(p.tile_counter + 1, 1), 0));
    }
};

// The producer thread.
__device__ inline void produce(const Params& p, const Maps& maps, const Smem& smem) {
    PipelineState<1> work_pipe;
    PipelineState<STAGES> pipe;
    ClaimOrder order;
    WorkTile work{};
    auto find = [&](WorkTile& work) {
        while (get_work(p, order, work)) {
            if (PACKED && work.q0 >= work.Nq(p)) continue;
            // Generic kernels are for flagged heads.
            if (!(head_flags(p, work.b, work.h / int(p.group)) & KNOWN)) return true;
        }
        return false;
    };
    auto publish_work = [&] {
#pragma unroll 1
        for (int g = 0; g < CONSUMERS; ++g) {
            smem.q_empty(g).wait(work_pipe.phase ^ 1);
            WorkTile& share = smem.storage.work_tiles[g];
            const Barrier full = smem.q_full(g);
            share = work;
            if (work.is_end) {
                full.arrive(), full.arrive();
                continue;
            }
            share.q0 += WARPGROUP_ROWS * g;
            share.tiles = key_tiles(p, work, share.q0, WARPGROUP_ROWS);
            const int row = work.q_start + share.q0;
            BOTH_LOADS(smem.q(g).load(maps.q, row, work.h, work.entry(), full),
                       smem.dout(g).load(maps.dout, row, work.h, work.entry(), full));
        }
        work_pipe.advance();
    };
#pragma unroll 1
    for (bool found = find(work); found;) {
        publish_work();
        const int kv = work.h / int(p.group), k_start = work.k_start, entry = work.entry();
        int tile = work.begin;
        auto load_next = [&] {
            const int row = k_start + tile++ * BLOCK_K;
            smem.empty(pipe.stage).wait(pipe.phase ^ 1);
            smem.v(pipe.stage).load(maps.v, row, kv, entry, smem.full(pipe.stage));
            pipe.advance();
            smem.empty(pipe.stage).wait(pipe.phase ^ 1);
            smem.k(pipe.stage).load(maps.k, row, kv, entry, smem.full(pipe.stage));
            pipe.advance();
        };
        const int end = work.end;
        if (tile < end) load_next();
        found = find(work);
        // Shared memory has no room for the next queries yet, but the L2 cache has.
        if (found)
#pragma unroll 1
            for (int row = 0; row < BLOCK_Q; row += WARPGROUP_ROWS) {
                const int first = work.q_start + work.q0 + row;
                QueryTile::prefetch(maps.q, first, work.h, work.entry());
                DoutTile::prefetch(maps.dout, first, work.h, work.entry());
            }
#pragma unroll 1
        while (tile < end) load_next();
    }
    work.is_end = true;
    publish_work();
}

// A consumer warpgroup.
__device__ __forceinline__ void consume(const Params& p, const Smem& smem, int warpgroup) {
    const int row0 = threadIdx.x / WARP % 4 * 16;
    const bool leader = threadIdx.x % WARPGROUP == 0;
    const Lane lane;
    PipelineState<1> work_pipe;
    PipelineState<STAGES> pipe;
    int v_stage = 0, k_stage = 0;
    WorkTile work;
    int tile = 0;
    Range attended;  // keys that some query attends to
    TileGradient<false, 1, NT> grad(0, 0);
    Fragment<Accum, 1, DT> dq;
    Atom<Element>::A ds[BLOCK_K / 16];
    Accum lse_log2[2], delta[2];
    const WarpBias<false, 1, NT> bias(nullptr);

    // By one thread: the GEMM that reads the stage is the warpgroup's as a whole, and it is complete.
    auto release = [&](int stage) {
        if (leader) smem.empty(stage).arrive();
    };
    // Zero keys and values that no query attends to: what is not finite there would make dQ NaN. Each
    // warpgroup does so for its own GEMMs: another one stores the same zeros.
    auto zero_unattended = [&](const auto& rows, int columns) {
        const int begin = attended.lo - tile * BLOCK_K, end = attended.hi - tile * BLOCK_K;
        if (!__any_sync(~0u, begin > 0 || end < BLOCK_K)) return;
        const u32 zeros[4] = {};
        const int chunks = columns / 8;
#pragma unroll 1
        for (int i = threadIdx.x % WARPGROUP; i < BLOCK_K * chunks; i += WARPGROUP) {
            const int row = i / chunks;
            if (row < begin || row >= end) store_shared(rows.chunk(row, i % chunks * 16), zeros);
        }
        fence_async_shared();
        named_barrier_sync<WARPGROUP>(barrier_id(NamedBarrier::WARPGROUP, warpgroup));
    };
    auto issue_dp_and_s = [&] {
        v_stage = pipe.stage;
        smem.full(v_stage).wait(pipe.phase);
        pipe.advance();
        zero_unattended(smem.v(v_stage), VALUE_DIM);
        gemm_async<Element, VALUE_DIM>(grad.ds, smem.dout(warpgroup), 0, smem.v(v_stage));
        k_stage = pipe.stage;
        smem.full(k_stage).wait(pipe.phase);
        pipe.advance();
        zero_unattended(smem.k(k_stage), HEAD_DIM);
        gemm_async<Element, HEAD_DIM>(grad.p, smem.q(warpgroup), 0, smem.k(k_stage));
    };
    auto compute_ds = [&] {
        grad.p.row = grad.ds.row = work.q0 + row0, grad.p.column = grad.ds.column = tile * BLOCK_K;
        grad.recompute_p(
            ScoreMod(p, work.b, work.h), bias, AttentionMask(p, work.sequence(p), work.h),
            Dropout(p, work.b, work.h), work.tiles.is_partial(tile) ? PARTIAL : FULL, false,
            [&](int, int, int) { return Accum(0); }, [&](int, int, int e) { return lse_log2[e / 2]; });
        grad.compute_ds(Accum(p.dropout_scale), [&](int, int, int e) { return delta[e / 2]; });
        grad.apply_dsoftcap();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; ++i) ds[i] = Atom<Element>::a_of(grad.ds.x[0] + 2 * i);
    };
    // The warpgroups issue their GEMMs in turn, one tile each, so that dS of one is computed beside the
    // GEMMs of the other.
    auto wait_turn = [&] { named_barrier_sync<CONSUMERS * WARPGROUP>(TURN_BARRIER + warpgroup); };
    auto pass_turn = [&] {
        named_barrier_arrive<CONSUMERS * WARPGROUP>(TURN_BARRIER + 1 - warpgroup);
    };
    // Tiles that only other warpgroups attend to.
    auto skip_tiles = [&](int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            wait_turn();
#pragma unroll 1
            for (int n = 0; n < 2; ++n, pipe.advance()) {
                smem.full(pipe.stage).wait(pipe.phase);
                // No GEMM has kept the warps together.
                named_barrier_sync<WARPGROUP>(barrier_id(NamedBarrier::WARPGROUP, warpgroup));
                release(pipe.stage);
            }
            pass_turn();
        }
    };

    if (warpgroup == 1) pass_turn();

    for (;;) {
        smem.q_full(warpgroup).wait(work_pipe.phase);
        work_pipe.advance();
        work = smem.storage.work_tiles[warpgroup];
        if (work.is_end) break;
        dq.clear();
        const SlidingWindow window(p, work.sequence(p));
        attended = window.key_range(0, window.Nq);
        // Beyond the last key of all, TMA has zeroed them.
        if (attended.hi + work.k_start >= p.Nk) attended.hi = FAR;
        if (work.tiles.begin >= work.tiles.end) {
            smem.q_empty(warpgroup).arrive();
            skip_tiles(work.end - work.begin);
            wait_turn(), pass_turn();
        } else {
            const i64 first = (i64(work.entry()) * p.Hq + work.h) * p.rows +
                              (PACKED ? (work.q_start / ROW_PAD + work.b) * ROW_PAD : 0) + work.q0 + row0;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const i64 row = first + lane.row(2 * half);
                lse_log2[half] = static_cast<const Accum*>(p.lse_log2)[row];
                delta[half] = static_cast<const Accum*>(p.delta)[row];
            }
            tile = work.tiles.begin;
            skip_tiles(tile - work.begin);
            wait_turn();
            issue_dp_and_s();
            pass_turn();
            warpgroup_wait<1>(grad.ds);
            release(v_stage);
            warpgroup_wait<0>(grad.p);
            // From dP and S of tile j to those of tile j + 1; q and dO are held throughout:
            //
            //     step                         GEMMs in flight      stages held
            //     dS of j                      -                    k(j)
            //     issue dQ of j                dQ                   k(j)
            //     issue dP, S of j + 1         dQ, dP, S            k(j), v(j + 1), k(j + 1)
            //     wait dQ, dP, S in turn       -                    k(j + 1)
#pragma unroll 1
            while (tile < work.tiles.end - 1) {
                const int held = k_stage;
                compute_ds();
                wait_turn();
                gemm_async<Element>(dq, ds, smem.k(held));
                ++tile;
                issue_dp_and_s();
                pass_turn();
                warpgroup_wait<2>(dq);
                release(held);
                warpgroup_wait<1>(grad.ds);
                release(v_stage);
                warpgroup_wait<0>(grad.p);
            }
            smem.q_empty(warpgroup).arrive();  // safe: only GEMMs read q and dO, and all are complete
            compute_ds();
            wait_turn();
            gemm_async<Element>(dq, ds, smem.k(k_stage));
            pass_turn();
            warpgroup_wait<0>(dq);
            release(k_stage);
            skip_tiles(work.end - work.tiles.end);
        }
        if (!all_finite_by_fma(dq)) head_flags(p, work.b, work.h / int(p.group)) |= FAILED;
        dq.scale(Accum(p.scale));
        const int row = work.q0 + row0;
        store_rows(rows_of<Element>(p.dq, p.dq_at, work.entry(), work.h) +
                       (work.q_start + row) * p.dq_at.n,
                   p.dq_at.n, dq, work.Nq(p) - row, int(p.D));
    }
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    backward_wide_dq_sm90(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage;
    const Smem smem{shared_address(tensors), storage};
    // Uniform in a warp, as the shuffle tells the compiler.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) smem.init();
    if (threadIdx.x == WARP)
        prefetch_tensormap(maps.k), prefetch_tensormap(maps.q), prefetch_tensormap(maps.v),
            prefetch_tensormap(maps.dout);
    wait_for_prerequisites();
    __syncthreads();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x % WARPGROUP == 0) produce(p, maps, smem);
    } else {
        reg_alloc<CONSUMER_REGISTERS>();
        consume(p, smem, warpgroup);
    }
}
