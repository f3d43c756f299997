// Attention, backward for all of q, k and v, on Hopper. One thread copies tiles of queries and of
// gradients of the output into rings, and one adds tiles of dq in float32 to global memory; two
// warpgroups multiply, each for 64 keys. Blocks of threads stay, and take one block of keys after
// the other, with all query heads that share it. Scores are computed transposed, so that they are
// at once operands of dv and dk, which stay in registers; mirrors backward_keys.cu.
// Shah et al., FlashAttention-3, arXiv:2407.08608.
#include "plain.cuh"
#include "walk_sm90.cuh"

constexpr int QT = BLOCK_Q / 8, DT = HEAD_DIM / 8, VT = VALUE_DIM / 8, DQT = DQ_COLUMNS / 8;

// Registers of a thread: what is given back by the warps that copy goes to those that multiply.
constexpr int COPY_REGISTERS = 24, MULTIPLY_REGISTERS = 240;

// Where there are registers for it, dv goes on while the gradients at the scores are found.
constexpr bool SOON = BLOCK_Q <= 64;
static_assert(SOON || !HAS_SOFTCAP, "the slopes need registers, too");

struct Maps {
    TensorMap q, k, v, dout;
};

__device__ inline const float* row_numbers(const Params& p, const void* numbers, int b, int h) {
    return static_cast<const float*>(numbers) + (i64(b) * p.Hq + h) * p.rows;
}

// One thread copies all that the works need, in the order in which it is needed.
__device__ inline void copy(const Params& p, const Maps& maps, const Memory& memory) {
    const int group = int(p.group);
    Place<1> kept;
    Place<1> v;
    Place<Q_STAGES> q;
    Place<OUT_STAGES> out;
    Work work{};
    auto load_queries = [&](int h, int q0) {
        const Barrier full = memory.q_full(q.stage);
        memory.q_empty(q.stage).wait(q.round ^ 1);
        memory.q(q.stage).load(maps.q, q0, h, work.b, full);
        load_piece(shared_address(memory.shared.shifts[q.stage]),
                   row_numbers(p, p.shift, work.b, h) + q0, ROW_BYTES, full);
        q.next();
    };
    auto load_out = [&](int h, int q0) {
        const Barrier full = memory.out_full(out.stage);
        memory.out_empty(out.stage).wait(out.round ^ 1);
        memory.dout(out.stage).load(maps.dout, q0, h, work.b, full);
        load_piece(shared_address(memory.shared.deltas[out.stage]),
                   row_numbers(p, p.delta, work.b, h) + q0, ROW_BYTES, full);
        out.next();
    };
    // All wait for the keys, with which they are told the work.
    auto tell = [&] {
        memory.k_empty().wait(kept.round ^ 1);
        memory.shared.work = work;
        kept.next();
    };
#pragma unroll 1
    for (int turn = 0; find_work(p, turn, work); ++turn) {
        const Tiles tiles = work.tiles;
        if (tiles.first >= tiles.past) {
            tell();
            memory.k_full().arrive();
            continue;
        }
        // There is no room for them before the last work is done.
        KeyTile::prefetch(maps.k, work.k0, work.kv, work.b);
        ValueTile::prefetch(maps.v, work.k0, work.kv, work.b);
        bool first = true;
#pragma unroll 1
        for (int g = 0; g < group; ++g)
#pragma unroll 1
            for (int tile = tiles.first; tile < tiles.past; ++tile) {
                const int h = work.kv * group + g, q0 = tile * BLOCK_Q;
                load_queries(h, q0);
                load_out(h, q0);
                if (!first) continue;
                first = false;
                // Room for values comes before room for keys.
                memory.v_empty().wait(v.round ^ 1);
                memory.v().load(maps.v, work.k0, work.kv, work.b, memory.v_full());
                v.next();
                tell();
                memory.k().load(maps.k, work.k0, work.kv, work.b, memory.k_full());
            }
    }
    work.end = true;
    tell();
    memory.k_full().arrive();
}

// One thread adds the tiles of dq that the warpgroups make to global memory.
__device__ inline void add(const Memory& memory) {
    for (Place<1> at;; at.next()) {
        memory.dq_full().wait(at.round);
        const Sums sums = memory.shared.sums;
        if (!sums.bytes) break;
        // For a fixed order of the sums: here is to be waited until it is this block's turn, and
        // when they are added, not only read, the next block is to be told.
        add_piece(sums.target, memory.dq(), sums.bytes);
        wait_read_pieces();
        memory.dq_empty().arrive();
    }
    wait_added_pieces();
}

// Whether all of them are finite: zero times what is not finite is not zero.
template <int NT>
__device__ inline bool are_finite(const Fragment<Sum, 1, NT>& c) {
    Sum spoiled[4] = {};  // not one long chain
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) spoiled[e] = fma(c.x[0][n][e], Sum(0), spoiled[e]);
    return spoiled[0] + spoiled[1] + spoiled[2] + spoiled[3] == 0;
}

// What one warpgroup does with the works.
__device__ inline void multiply(const Params& p, const Memory& memory, int group) {
    const bool leader = threadIdx.x % GROUP == 0, warp_leader = threadIdx.x % WARP == 0;
    const int heads = int(p.group), row0 = threadIdx.x / WARP * 16;
    const Lane lane;
    Place<1> kept, v_at, dq_at;
    Place<Q_STAGES> q_at;
    Place<OUT_STAGES> out_at;
    Place<PAIR_STAGES> pair_at;

    Work work{};
    int tile = 0, h = 0;
    Scores<true, 1, QT> s(0, 0);
    Fragment<Sum, 1, HAS_SOFTCAP ? QT : 1> derivatives;
    Fragment<Sum, 1, DT> dk;
    Fragment<Sum, 1, VT> dv;
    Atom<Element>::A weights[BLOCK_Q / 16], gradients[BLOCK_Q / 16];

    auto begin_scores = [&] {
        begin_product<Element, HEAD_DIM>(s, memory.k(), GROUP_ROWS * group, memory.q(q_at.stage));
    };
    auto keep = [](Atom<Element>::A (&kept)[BLOCK_Q / 16], const Fragment<Sum, 1, QT>& c) {
#pragma unroll
        for (int i = 0; i < BLOCK_Q / 16; ++i) kept[i] = Atom<Element>::a_of(c.x[0] + 2 * i);
    };
    // s becomes the probabilities.
    auto find_weights = [&](bool boundary) {
        const Terms terms(p, work.b, h);
        s.row = work.k0 + row0, s.column = tile * BLOCK_Q;
        s.apply(terms, WarpBias<true, 1, QT>(nullptr), [&](int, int n, int e, Sum derivative) {
            if constexpr (HAS_SOFTCAP) derivatives.x[0][n][e] = derivative;
        });
        if (boundary) s.hide(Sight(p, work.b, h), DenseMask<true, 1, QT>{});
        const float* const shifts = memory.shared.shifts[q_at.stage] + lane.column(0);
        const Sum unit = terms.unit();
#pragma unroll
        for (int n = 0; n < QT; ++n) {
            const float2 shift = *reinterpret_cast<const float2*>(shifts + 8 * n);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                s.x[0][n][e] = exp2_of(fma(s.x[0][n][e], unit, -(e % 2 ? shift.y : shift.x)));
        }
    };
    // After that s is the probabilities times the slope of the softcap.
    auto keep_weights = [&] {
        keep(weights, s);
        if constexpr (HAS_SOFTCAP)
            s.for_each([&](Sum& x, int, int, int, int n, int e) { x *= derivatives.x[0][n][e]; });
    };
    auto find_gradients = [&](Fragment<Sum, 1, QT>& dp) {
        const float* const deltas = memory.shared.deltas[out_at.stage] + lane.column(0);
#pragma unroll
        for (int n = 0; n < QT; ++n) {
            const float2 delta = *reinterpret_cast<const float2*>(deltas + 8 * n);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                dp.x[0][n][e] = s.x[0][n][e] * (dp.x[0][n][e] - (e % 2 ? delta.y : delta.x));
        }
    };
    auto begin_dv = [&] { begin_product<Element>(dv, weights, memory.dout(out_at.stage)); };
    auto tell_sums = [&](int bytes) {
        if (threadIdx.x == 0) {
            const i64 row = (i64(work.b) * p.Hq + h) * p.Nq + tile * BLOCK_Q;
            memory.shared.sums = {static_cast<float*>(p.dq_sum) + row * HEAD_DIM, bytes};
        }
        __syncwarp();
        if (warp_leader) memory.dq_full().arrive();
        dq_at.next();
    };
    auto add_dq = [&](const Fragment<Sum, 1, DQT>& dq) {
        memory.dq_empty().wait(dq_at.round ^ 1);
        store_sums(memory.dq(), HEAD_DIM, dq, row0 - group % DQ_SHARES * GROUP_ROWS,
                   group % DQ_SHARES * DQ_COLUMNS);
        fence_shared();
        tell_sums(min(BLOCK_Q, int(p.Nq) - tile * BLOCK_Q) * SUM_BYTES);
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
        if constexpr (SOON) {
            keep_weights();
            begin_dv();
            end_product<1>(dp);
        } else {
            end_product<0>(dp);
        }
        if (!more && leader) memory.v_empty().arrive();
        find_gradients(dp);
        if constexpr (!SOON) keep_weights(), begin_dv();
        keep(gradients, dp);
        store_operands<Element>(memory.ds(pair_at.stage), gradients, row0);
        fence_shared();
        sync_named<GROUPS * GROUP>(1);  // the gradients of all keys are here
        begin_product_of_rows<Element>(dq, memory.ds(pair_at.stage),
                                       group / DQ_SHARES * GROUP_ROWS, memory.k(),
                                       group % DQ_SHARES * DQ_COLUMNS);
        begin_product<Element>(dk, gradients, memory.q(q_at.stage));
        end_product<2>(dv);  // the registers of the weights are needed
        if (leader) memory.out_empty(out_at.stage).arrive();
        out_at.next();
        pair_at.next();
        const Place<Q_STAGES> q_read = q_at;
        q_at.next();
        if (more) {
            memory.q_full(q_at.stage).wait(q_at.round);
            begin_scores();
            end_product<2>(dq);
        } else {
            write_dv();  // meanwhile
            end_product<1>(dq);
            memory.k_empty().arrive();
        }
        add_dq(dq);
        if (more) {
            end_product<0>(s);  // and dk
        } else {
            end_product<0>(dk);
        }
        if (leader) memory.q_empty(q_read.stage).arrive();
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
#pragma unroll 1
            for (int g = 0; g < heads; ++g) {
                h = work.kv * heads + g;
                const int past = tiles.past - (g + 1 == heads);  // the last of all is apart
                for (tile = tiles.first; tile < past;) {
                    if (tiles.boundary(tile)) {
                        visit(true, true), ++tile;
                    } else {
                        const int full_past = min(past, tiles.full_past);
#pragma unroll 1
                        for (; tile < full_past; ++tile) visit(false, true);
                    }
                }
            }
            visit(true, false);
        } else {
            write_dv();
            memory.k_empty().arrive();
        }
        write_dk();
    }
    memory.dq_empty().wait(dq_at.round ^ 1);
    tell_sums(0);
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
            if (threadIdx.x % WARP == 0) add(memory);
        }
    } else {
        take_registers<MULTIPLY_REGISTERS>();
        multiply(p, memory, group);
    }
}
