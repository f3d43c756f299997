// Attention, backward for all of q, k and v, on Hopper. One thread copies tiles of queries and of
// gradients of the output into rings, and two add pieces of dq in float32 to global memory; two
// warpgroups multiply, each for 64 keys. Blocks of threads stay, and take one block of keys after
// the other, with all query heads that share it. Scores are computed transposed, so that they are at
// once operands of dv and dk, which stay in registers; mirrors backward_keys.cu.
// Shah et al., FlashAttention-3, arXiv:2407.08608.
#include "feed_sm90.cuh"

constexpr int DQT = DQ_COLUMNS / 8;
static_assert(!HAS_SOFTCAP || BLOCK_Q <= 64, "the slopes need registers, too");
static_assert(GROUP / WARP * STAGED_BYTES <= PairTile::SLICE, "where only this warpgroup writes");

// What one warpgroup does with the works. The other may be up to a tile ahead or behind, so that one
// multiplies while the other does what lies between.
__device__ __forceinline__ void multiply(const Params& p, const Memory& memory, int group) {
    const int heads = int(p.group), row0 = threadIdx.x / WARP * 16;
    Place<1> kept, v_at;
    Place<Q_STAGES> q_at;
    Place<OUT_STAGES> out_at;
    Place<PAIR_STAGES> pair_at;
    Place<SUM_STAGES> sums_at;

    Work work{};
    int tile = 0, h = 0;
    TileScores s(0, 0);
    Slopes slopes;
    Fragment<Sum, 1, QT> dp;
    Fragment<Sum, 1, DT> dk;
    Fragment<Sum, 1, VT> dv;
    Operands weights, gradients;
    int behind = 0;  // the stage of queries whose product with gradients is under way

    auto begin_scores = [&] {
        memory.q_full(q_at.stage).wait(q_at.round);
        begin_product<Element, HEAD_DIM>(s, memory.k(), GROUP_ROWS * group, memory.q(q_at.stage));
    };
    auto find_weights = [&](bool boundary) {
        s.row = work.k0 + row0, s.column = tile * BLOCK_Q;
        weigh(p, work.b, h, boundary, memory.shared.shifts[q_at.stage], s, slopes);
        keep(weights, s);
        take_slopes(s, slopes);
    };
    auto begin_dv = [&] {
        memory.out_full(out_at.stage).wait(out_at.round);
        begin_product<Element>(dv, weights, memory.dout(out_at.stage));
    };
    auto begin_dp = [&] {
        begin_product<Element, VALUE_DIM>(dp, memory.v(), GROUP_ROWS * group,
                                          memory.dout(out_at.stage));
    };
    // Of the tile whose products with gradients of the output are under way. mend() sees the gradients
    // at the scores before they are told.
    auto tell_gradients = [&](auto mend) {
        end_product<0>(dp);
        find_gradients(memory.shared.deltas[out_at.stage], dp,
                       [&](int n, int e) { return s.x[0][n][e]; });
        mend();
        keep(gradients, dp);
        memory.pairs_empty(pair_at.stage).wait(pair_at.round ^ 1);
        store_operands<Element>(memory.ds(pair_at.stage), gradients, row0);
        fence_shared();
        memory.pairs_full(pair_at.stage).arrive();
        // Safe: dP is complete, so dv's GEMM before it is too; and the deltas are consumed, for the
        // gradients made of them are stored, with the proxy fence behind.
        memory.out_empty(out_at.stage).arrive();
        out_at.next();
        behind = q_at.stage;
        q_at.next();
    };
    auto begin_dk = [&] { begin_product<Element>(dk, gradients, memory.q(behind)); };
    auto begin_dq = [&](Fragment<Sum, 1, DQT>& dq, bool partial) {
        memory.pairs_full(pair_at.stage).wait(pair_at.round);  // the gradients of all keys
        begin_product_of_rows<Element>(dq, memory.ds(pair_at.stage),
                                       group / DQ_SHARES * GROUP_ROWS, keys_of(memory, partial),
                                       group % DQ_SHARES * DQ_COLUMNS);
    };
    auto add_dq = [&](const Fragment<Sum, 1, DQT>& dq) {
        // Safe: only dq's GEMM reads the stage, and it is complete.
        memory.pairs_empty(pair_at.stage).arrive();
        pair_at.next();
        send_sums(memory, group, dq, row0 % GROUP_ROWS, sums_at);
    };
    // By way of a tile of gradients at the scores that nobody reads any more.
    auto write = [&](void* target, const Rows& at, int columns, const auto& sums,
                     const Place<PAIR_STAGES>& pair) {
        if (!REPAIRS && !are_finite(sums)) special(p, work.b, work.kv) |= FAILED;
        const int row = work.k0 + row0;
        memory.pairs_empty(pair.stage).wait(pair.round ^ 1);
        stage_rows(memory.staged(pair.stage),
                   rows_of<Element>(target, at, work.b, work.kv) + row * at.n, at.n, sums,
                   int(p.Nk) - row, columns);
    };
    auto write_dv = [&](const Place<PAIR_STAGES>& pair) {
        write(p.dv, p.dv_at, int(p.Dv), dv, pair);
    };
    auto write_dk = [&] {
#pragma unroll
        for (auto& atom : dk.x[0])
#pragma unroll
            for (Sum& x : atom) x *= Sum(p.scale);
        write(p.dk, p.dk_at, int(p.D), dk, pair_at);
    };
    auto begin = [&] {
        begin_scores();
        memory.v_full().wait(v_at.round);
        v_at.next();
        end_product<0>(s);
        find_weights(true);
        begin_dv();
        end_product<0>(dv);  // there are no registers for weights and products
        begin_dp();
    };
    // From the gradients of one tile to the probabilities of the next.
    auto go_on = [&](bool boundary) {
        Fragment<Sum, 1, DQT> dq;
        tell_gradients([] {});
        begin_scores();
        begin_dk();
        end_product<1>(s);
        find_weights(boundary);
        begin_dv();
        end_product<1>(dk);
        // Safe: the GEMMs that read these queries are complete; their shifts were consumed by the
        // probabilities behind the gradients that `tell_gradients` has stored and fenced.
        memory.q_empty(behind).arrive();
        begin_dq(dq, false);
        end_product<0>(dv);
        end_product<0>(dq);
        add_dq(dq);
        begin_dp();
    };
    auto end = [&] {
        Fragment<Sum, 1, DQT> dq;
        tell_gradients([] {});
        memory.v_empty().arrive();  // safe: only GEMMs read it, and the last dP is complete
        begin_dk();
        write_dv(pair_at.after());  // meanwhile
        begin_dq(dq, false);
        end_product<0>(dk);
        end_product<0>(dq);
        memory.q_empty(behind).arrive();  // safe as in `go_on`
        // Safe: all GEMMs that read the keys are complete, and what was read of the work is long
        // consumed; the producer's generic write of the next work needs no proxy fence.
        memory.k_empty().arrive();
        add_dq(dq);
    };

    // To repair: NaN-safe, one step after the other.
    auto visit_safely = [&](bool boundary, bool) {
        const bool partial = is_partial(p, tile, boundary);
        const SpoiledOut table{memory.ds(pair_at.after().stage).address};
        begin_scores();
        end_product<0>(s);
        memory.out_full(out_at.stage).wait(out_at.round);
        const bool spoiled = partial && clean_tile(memory, q_at.stage, out_at.stage, table);
        s.row = work.k0 + row0, s.column = tile * BLOCK_Q;
        const Attended<1, QT> attended =
            weigh_safely(p, work.b, h, partial, memory.shared.shifts[q_at.stage], s, weights,
                         spoiled, table, dv);
        begin_dv();
        end_product<0>(dv);
        begin_dp();  // the delta is NaN where dout was not finite
        Fragment<Sum, 1, DQT> dq;
        tell_gradients([&] { attended.fill_others(dp, 0); });
        begin_dk();
        begin_dq(dq, partial);
        end_product<0>(dk);
        end_product<0>(dq);
        memory.q_empty(behind).arrive();  // safe as in `go_on`
        add_dq(dq);
    };

    for (;;) {
        dk.clear();
        dv.clear();
        memory.k_full().wait(kept.round);
        kept.next();
        work = memory.shared.work;
        if (work.end) break;
        const bool seen = work.tiles.first < work.tiles.past;
        if (seen) zero_unseen(p, memory, work, v_at.round);
        if (seen && REPAIRS) {
            clean_keys(memory);
            memory.v_full().wait(v_at.round);
            v_at.next();
            visit_all(work, heads, h, tile, visit_safely);
            // Safe: the last visit has ended all GEMMs.
            memory.v_empty().arrive();
            memory.k_empty().arrive();
            write_dv(pair_at);
        } else if (seen) {
            walk(work, heads, h, tile, begin, go_on);
            end();
        } else {
            memory.k_empty().arrive();  // safe: the branch has consumed what was read of the work
            write_dv(pair_at);
        }
        write_dk();
        sync_named<GROUP>(1 + group);  // what the warps have staged they have read
    }
}

extern "C" __global__ void __launch_bounds__((GROUPS + 1) * GROUP, 1)
    backward_sm90(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char tiles[];
    __shared__ Shared shared;
    const Memory memory{shared_address(tiles), shared};
    if (REPAIRS && !any_to_repair(p)) return;
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
        } else if (warp <= WARPS_M + ADDERS) {
            const int own = warp - WARPS_M - 1;
            if (threadIdx.x % WARP == 0)
                add(p, memory, {own, own / DQ_SHARES * DQ_ROWS, own % DQ_SHARES * DQ_COLUMNS,
                                DQ_COLUMNS});
        }
    } else {
        take_registers<MULTIPLY_REGISTERS>();
        multiply(p, memory, group);
    }
}
