// Attention, backward for all of q, k and v, on Hopper, where heads have more than 128 columns: as
// backward_sm90.cu, but the sums of dk and dv of 64 keys fill the registers of a warpgroup each. So
// one has dv, finds probabilities and tells them to the other, which has dk, and finds the
// gradients at the scores. Both compute pieces of dq from these, each with a thread that adds them
// to global memory. To repair, both are NaN-safe.
#include "feed_sm90.cuh"

constexpr int DQ_SLICE = 64;  // columns of dq that are computed at a time
static_assert(IS_WIDE && GROUPS == 2 && BLOCK_Q == GROUP_ROWS && HEAD_DIM % DQ_SLICE == 0);

// The warpgroups by what they have in their registers, and the columns of dq of each: the one that
// also has the exponentials to do never has more.
constexpr int VALUES = 0, KEYS = 1;

constexpr int first_column(int group) {
    return group == VALUES ? 0 : HEAD_DIM / DQ_SLICE / 2 * DQ_SLICE;
}
constexpr int past_column(int group) { return group == VALUES ? first_column(KEYS) : HEAD_DIM; }

// Write 16 rows of each warp to an array of the gradient of keys or values.
template <int NT>
__device__ inline void write_rows(const Params& p, void* target, const Rows& at, const Work& work,
                                  int row0, int columns, const Fragment<Sum, 1, NT>& sums) {
    const int row = work.k0 + row0;
    store_rows(rows_of<Element>(target, at, work.b, work.kv) + row * at.n, at.n, sums,
               int(p.Nk) - row, columns);
}

// A warpgroup's columns of dq, of a tile whose gradients at the scores are there: a slice after the
// other, as there are registers for. In the end no product is under way, those begun before included.
template <int GROUP_NUMBER>
__device__ inline void find_dq(const Memory& memory, const KeyTile& k, int stage, int row0,
                               Place<SUM_STAGES>& at) {
#pragma unroll
    for (int n = first_column(GROUP_NUMBER); n < past_column(GROUP_NUMBER); n += DQ_SLICE) {
        Fragment<Sum, 1, DQ_SLICE / 8> dq;
        begin_product_of_rows<Element>(dq, memory.ds(stage), 0, k, n);
        end_product<0>(dq);
        send_sums(memory, GROUP_NUMBER, dq, row0, at);
    }
}

// What the warpgroups have in place of a gradient at the score of a pair that is not attended to:
// probabilities are not negative.
constexpr Sum HIDDEN = -1;

// The table of what is not finite in dout.
__device__ inline SpoiledOut table_of(const Memory& memory, const Place<PAIR_STAGES>& pair) {
    return {memory.ds(pair.after().stage).address};
}

// What the warpgroup that has dv does with the works.
__device__ __forceinline__ void find_dv(const Params& p, const Memory& memory) {
    const int row0 = threadIdx.x / WARP % 4 * 16;
    Place<1> kept, values_at;
    Place<SUM_STAGES> sums_at;
    Place<Q_STAGES> q_at;
    Place<OUT_STAGES> out_at;
    Place<PAIR_STAGES> pair_at;
    Work work{};
    int tile = 0, h = 0;
    TileScores s(0, 0);
    Slopes slopes;
    Fragment<Sum, 1, VT> dv;
    Operands weights;

    auto begin_scores = [&] {
        memory.q_full(q_at.stage).wait(q_at.round);
        begin_product<Element, HEAD_DIM>(s, memory.k(), 0, memory.q(q_at.stage));
    };
    // The scores of this tile are there. Where there is one more, so are its scores in the end. To
    // repair, scores are not computed ahead: whether there is one more is known too late.
    auto visit = [&](bool boundary, bool more) {
        if constexpr (REPAIRS) {
            begin_scores();
            end_product<0>(s);
        }
        const bool partial = REPAIRS && is_partial(p, tile, boundary);
        const float* const shifts = memory.shared.shifts[q_at.stage];
        s.row = work.k0 + row0, s.column = tile * BLOCK_Q;
        if constexpr (REPAIRS) {
            memory.out_full(out_at.stage).wait(out_at.round);
            const SpoiledOut table = table_of(memory, pair_at);
            const bool spoiled = partial && clean_tile(memory, q_at.stage, out_at.stage, table);
            weigh_safely(p, work.b, h, partial, shifts, s, weights, spoiled, table, dv)
                .fill_others(s, HIDDEN);
        } else {
            weigh(p, work.b, h, boundary, shifts, s, slopes);
            keep(weights, s);
            take_slopes(s, slopes);
        }
        hand_over(memory.weights(), s);
        fence_shared();
        memory.weights_full().arrive();
        // Safe: the scores' GEMM is complete; and the shifts are consumed, for the probabilities made
        // of them are handed over, with the proxy fence behind.
        memory.q_empty(q_at.stage).arrive();
        q_at.next();
        memory.out_full(out_at.stage).wait(out_at.round);
        begin_product<Element>(dv, weights, memory.dout(out_at.stage));
        if (!REPAIRS && more) {
            begin_scores();
            end_product<1>(dv);
        } else {
            end_product<0>(dv);
        }
        memory.out_empty(out_at.stage).arrive();  // safe: only dv's GEMM read it here
        out_at.next();
        // Then the other warpgroup has read the weights, too.
        memory.pairs_full(pair_at.stage).wait(pair_at.round);
        find_dq<VALUES>(memory, keys_of(memory, partial), pair_at.stage, row0, sums_at);
        pair_at.next();
        if (!REPAIRS && more) end_product<0>(s);
    };

    for (;;) {
        memory.k_full().wait(kept.round);
        kept.next();
        work = memory.shared.work;
        if (work.end) break;
        dv.clear();
        if (work.tiles.first < work.tiles.past) {
            zero_unseen(p, memory, work, values_at.round);
            values_at.next();
            if constexpr (REPAIRS) {
                clean_keys(memory);
            } else {
                begin_scores();
                end_product<0>(s);
            }
            visit_all(work, int(p.group), h, tile, visit);
        }
        // Safe: all GEMMs that read the keys are complete, and the visits have consumed the work.
        memory.k_empty().arrive();
        if (!REPAIRS && !are_finite(dv)) special(p, work.b, work.kv) |= FAILED;
        write_rows(p, p.dv, p.dv_at, work, row0, int(p.Dv), dv);
    }
}

// What the warpgroup that has dk does with the works.
__device__ __forceinline__ void find_dk(const Params& p, const Memory& memory) {
    const int row0 = threadIdx.x / WARP % 4 * 16;
    Place<1> kept, v_at, weights_at;
    Place<SUM_STAGES> sums_at;
    Place<Q_STAGES> q_at;
    Place<OUT_STAGES> out_at;
    Place<PAIR_STAGES> pair_at;
    Work work{};
    int tile = 0, h = 0;
    Fragment<Sum, 1, QT> dp;
    Fragment<Sum, 1, DT> dk;
    Operands gradients;

    auto begin_gradients = [&] {
        memory.out_full(out_at.stage).wait(out_at.round);
        begin_product<Element, VALUE_DIM>(dp, memory.v(), 0, memory.dout(out_at.stage));
    };
    // The products of dout and v of this tile are under way. Where there is one more, so are its
    // in the end: while the other warpgroup finds its probabilities. To repair, they are begun here.
    auto visit = [&](bool boundary, bool more) {
        const bool partial = REPAIRS && is_partial(p, tile, boundary);
        if constexpr (REPAIRS) begin_gradients();
        end_product<0>(dp);
        if (partial) {
            memory.q_full(q_at.stage).wait(q_at.round);
            clean_tile(memory, q_at.stage, out_at.stage, table_of(memory, pair_at));
        }
        if (!more) memory.v_empty().arrive();  // safe: only GEMMs read it, and the last is complete
        {
            Fragment<Sum, 1, QT> s;
            memory.weights_full().wait(weights_at.round);
            weights_at.next();
            take_over(s, memory.weights());
            find_gradients(memory.shared.deltas[out_at.stage], dp,
                           [&](int n, int e) { return s.x[0][n][e]; });
            if constexpr (REPAIRS)
#pragma unroll
                for (int n = 0; n < QT; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (s.x[0][n][e] == HIDDEN) dp.x[0][n][e] = 0;
        }
        keep(gradients, dp);
        // Of two tiles ago: the products of this warpgroup that read it were over before the last
        // gradients were all there, those of the other one before these weights.
        static_assert(PAIR_STAGES == 2, "what is two tiles old is overwritten unasked");
        store_operands<Element>(memory.ds(pair_at.stage), gradients, row0);
        fence_shared();
        memory.pairs_full(pair_at.stage).arrive();
        // Safe: dP's GEMM is complete; and the deltas are consumed, for the gradients made of them
        // are stored, with the proxy fence behind.
        memory.out_empty(out_at.stage).arrive();
        out_at.next();
        memory.q_full(q_at.stage).wait(q_at.round);
        begin_product<Element>(dk, gradients, memory.q(q_at.stage));
        memory.pairs_full(pair_at.stage).wait(pair_at.round);
        find_dq<KEYS>(memory, keys_of(memory, partial), pair_at.stage, row0, sums_at);
        end_product<0>(dk);
        memory.q_empty(q_at.stage).arrive();  // safe: only dk's GEMM read it here
        q_at.next();
        pair_at.next();
        if (!REPAIRS && more) begin_gradients();
    };

    for (;;) {
        memory.k_full().wait(kept.round);
        kept.next();
        work = memory.shared.work;
        if (work.end) break;
        dk.clear();
        if (work.tiles.first < work.tiles.past) {
            zero_unseen(p, memory, work, v_at.round);
            if constexpr (REPAIRS) clean_keys(memory);
            memory.v_full().wait(v_at.round);
            v_at.next();
            if constexpr (!REPAIRS) begin_gradients();
            visit_all(work, int(p.group), h, tile, visit);
        }
        memory.k_empty().arrive();  // safe, likewise
        if (!REPAIRS && !are_finite(dk)) special(p, work.b, work.kv) |= FAILED;
#pragma unroll
        for (auto& atom : dk.x[0])
#pragma unroll
            for (Sum& x : atom) x *= Sum(p.scale);
        write_rows(p, p.dk, p.dk_at, work, row0, int(p.D), dk);
    }
}

extern "C" __global__ void __launch_bounds__((GROUPS + 1) * GROUP, 1)
    backward_wide_sm90(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
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
        const int warp = __shfl_sync(~0u, threadIdx.x / WARP, 0);
        if (threadIdx.x % WARP) return;
        if (warp == WARPS_M) {
            copy(p, maps, memory);
        } else if (warp <= WARPS_M + GROUPS) {
            const int own = warp - WARPS_M - 1;
            const int first = first_column(own);
            add(p, memory, {own, 0, first, past_column(own) - first});
        }
    } else {
        take_registers<MULTIPLY_REGISTERS>();
        if (group == VALUES) {
            find_dv(p, memory);
        } else {
            find_dk(p, memory);
        }
    }
}
