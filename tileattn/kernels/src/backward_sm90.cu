// Attention, backward for all of q, k and v, on Hopper. One thread copies tiles of queries and of
// gradients of the output into rings, and one adds tiles of dq in float32 to global memory; two
// warpgroups multiply, each for 64 keys. Blocks of threads stay, and take one block of keys after
// the other, with all query heads that share it. Scores are computed transposed, so that
// probabilities are an operand of dv as they are; dv and dk stay in registers; mirrors
// backward_keys.cu.
// Shah et al., FlashAttention-3, arXiv:2407.08608.
#include "feed_sm90.cuh"

constexpr int DQT = DQ_COLUMNS / 8;

// Where there are registers for it, dv goes on while the gradients at the scores are found, and dk
// while the next probabilities are; then dk has these gradients from shared memory.
constexpr bool OVERLAPS = BLOCK_Q <= 64;
static_assert(OVERLAPS || !HAS_SOFTCAP, "the slopes need registers, too");
static_assert(!OVERLAPS || GROUP / WARP * STAGED_BYTES == PairTile::SLICE,
              "sums are staged where nobody but the own warpgroup reads gradients for dk");

// What one warpgroup does with the works.
__device__ inline void multiply(const Params& p, const Memory& memory, int group) {
    const bool leader = threadIdx.x % GROUP == 0, warp_leader = threadIdx.x % WARP == 0;
    const int heads = int(p.group), row0 = threadIdx.x / WARP * 16;
    Place<1> kept, v_at, dq_at;
    Place<Q_STAGES> q_at;
    Place<OUT_STAGES> out_at;
    Place<PAIR_STAGES> pair_at;

    Work work{};
    int tile = 0, h = 0;
    TileScores s(0, 0);
    Slopes slopes;
    Fragment<Sum, 1, DT> dk;
    Fragment<Sum, 1, VT> dv;
    Operands weights;
    int behind = -1;  // the stage of queries whose product with gradients is still under way

    auto begin_scores = [&] {
        begin_product<Element, HEAD_DIM>(s, memory.k(), GROUP_ROWS * group, memory.q(q_at.stage));
    };
    auto find_weights = [&](bool boundary) {
        s.row = work.k0 + row0, s.column = tile * BLOCK_Q;
        weigh(p, work.b, h, boundary, memory.shared.shifts[q_at.stage], s, slopes);
    };
    auto keep_weights = [&] { keep(weights, s), take_slopes(s, slopes); };
    auto begin_dv = [&] { begin_product<Element>(dv, weights, memory.dout(out_at.stage)); };
    auto add_dq = [&](const Fragment<Sum, 1, DQT>& dq) {
        memory.dq_empty().wait(dq_at.round ^ 1);
        store_sums(memory.dq(), HEAD_DIM, dq, row0 - group % DQ_SHARES * GROUP_ROWS,
                   group % DQ_SHARES * DQ_COLUMNS);
        fence_shared();
        __syncwarp();
        if (warp_leader) memory.dq_full().arrive();
        dq_at.next();
    };
    // By way of a tile of gradients at the scores that nobody reads now.
    auto write = [&](void* target, const Rows& at, int columns, const auto& sums, int stage) {
        if (!are_finite(sums)) unfinished(p, work.b, work.kv) = 1;
        const int row = work.k0 + row0;
        stage_rows(memory.staged(stage), rows_of<Element>(target, at, work.b, work.kv) + row * at.n,
                   at.n, sums, int(p.Nk) - row, columns);
    };
    // Then the products of the last visit that still read keys are done. What the warps have staged
    // they have read before any hears of the next work.
    auto write_dv = [&] { write(p.dv, p.dv_at, int(p.Dv), dv, pair_at.stage); };
    auto write_dk = [&] {
#pragma unroll
        for (auto& atom : dk.x[0])
#pragma unroll
            for (Sum& x : atom) x *= Sum(p.scale);
        // All have multiplied the gradients of the last visit.
        memory.dq_full().wait(dq_at.round ^ 1);
        write(p.dk, p.dk_at, int(p.D), dk, pair_at.stage ^ 1);
    };
    // The scores of this tile are there. Where there is one more, so are its scores in the end.
    auto visit = [&](bool boundary, bool more) {
        Fragment<Sum, 1, QT> dp;
        Fragment<Sum, 1, DQT> dq;
        memory.out_full(out_at.stage).wait(out_at.round);
        begin_product<Element, VALUE_DIM>(dp, memory.v(), GROUP_ROWS * group,
                                          memory.dout(out_at.stage));
        find_weights(boundary);
        if constexpr (OVERLAPS) {
            keep_weights();
            begin_dv();
            end_product<1>(dp);
            end_product<1>(dk);  // which began before
            if (behind >= 0) memory.q_empty(behind).arrive();
        } else {
            end_product<0>(dp);
        }
        if (!more && leader) memory.v_empty().arrive();
        find_gradients(memory.shared.deltas[out_at.stage], dp,
                       [&](int n, int e) { return s.x[0][n][e]; });
        if constexpr (!OVERLAPS) keep_weights(), begin_dv();
        Operands gradients;
        keep(gradients, dp);
        store_operands<Element>(memory.ds(pair_at.stage), gradients, row0);
        fence_shared();
        sync_named<GROUPS * GROUP>(1);  // the gradients of all keys are here
        begin_product_of_rows<Element>(dq, memory.ds(pair_at.stage),
                                       group / DQ_SHARES * GROUP_ROWS, memory.k(),
                                       group % DQ_SHARES * DQ_COLUMNS);
        if constexpr (!OVERLAPS) begin_product<Element>(dk, gradients, memory.q(q_at.stage));
        end_product<OVERLAPS ? 1 : 2>(dv);  // the registers of the weights are needed
        memory.out_empty(out_at.stage).arrive();
        out_at.next();
        pair_at.next();
        behind = q_at.stage;
        q_at.next();
        if (more) {
            memory.q_full(q_at.stage).wait(q_at.round);
            begin_scores();
        }
        if constexpr (OVERLAPS)
            begin_product_of_columns<Element>(dk, memory.ds(pair_at.stage ^ 1),
                                              GROUP_ROWS * group, memory.q(behind));
        if (more) {
            end_product<2>(dq);
        } else {
            write_dv();  // meanwhile
            end_product<1>(dq);
            memory.k_empty().arrive();
        }
        add_dq(dq);
        if (OVERLAPS && more) {
            end_product<1>(s);
        } else {
            if (more) end_product<0>(s);
            end_product<0>(dk);
            memory.q_empty(behind).arrive();
            behind = -1;
        }
    };

    for (;;) {
        dk.clear();
        dv.clear();
        memory.k_full().wait(kept.round);
        kept.next();
        work = memory.shared.work;
        if (work.end) break;
        const Tiles tiles = work.tiles;
        if (tiles.first < tiles.past) {
            memory.q_full(q_at.stage).wait(q_at.round);
            begin_scores();
            memory.v_full().wait(v_at.round);
            v_at.next();
            end_product<0>(s);
            visit_all(work, heads, h, tile, visit);
        } else {
            write_dv();
            memory.k_empty().arrive();
        }
        write_dk();
    }
}

extern "C" __global__ void __launch_bounds__((GROUPS + 1) * GROUP, 1)
    backward_sm90(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char tiles[];
    __shared__ Shared shared;
    const Memory memory{shared_address(tiles), shared};
    // The same in all lanes of a warp, as the compiler is to know.
    const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0);
    if (threadIdx.x == 0) memory.start();
    if (threadIdx.x == WARP)
        prefetch_map(maps.k), prefetch_map(maps.q), prefetch_map(maps.v), prefetch_map(maps.dout);
    __syncthreads();
    if (group == GROUPS) {
        keep_registers<COPY_REGISTERS>();
        // Warp by warp: were it thread by thread, they would need more registers than they have.
        const int warp = __shfl_sync(~0u, threadIdx.x / WARP, 0);
        if (warp == WARPS_M) {
            if (threadIdx.x % WARP == 0) copy(p, maps, memory);
        } else if (warp == WARPS_M + 1) {
            if (threadIdx.x % WARP == 0)
                add(p, memory, {0, 0, 1, memory.dq(), memory.dq_full(), memory.dq_empty()});
        }
    } else {
        take_registers<MULTIPLY_REGISTERS>();
        multiply(p, memory, group);
    }
}
