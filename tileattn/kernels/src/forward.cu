// Attention, forward: one block of threads for each block of queries, key blocks ascending.
// Mirrors forward_rows in spec.py. Dao, FlashAttention-2, arXiv:2307.08691, Algorithm 1.
//
// A weight of zero does not hide a NaN. So where something is not finite in the end, there is a
// second, careful pass, in which values that are not finite are taken out; rows that have seen one
// of them, or are still not finite, are left to the textbook. The others keep the bits that they
// would have had with any other value there.
#include "plain.cuh"
#include "softmax.cuh"

constexpr int MT = BLOCK_Q / (16 * WARPS_M);  // 16-row tiles of a warp
constexpr int NT = BLOCK_K / (8 * WARPS_N);   // 8-column tiles of its scores
constexpr int VT = VALUE_DIM / (8 * WARPS_N);
static_assert(NT % 2 == 0 && VT % 2 == 0, "atoms come in pairs of columns");

using QueryTile = Tile<Element, BLOCK_Q, HEAD_DIM>;
using KeyTile = Tile<Element, BLOCK_K, HEAD_DIM>;
using ValueTile = Tile<Element, BLOCK_K, VALUE_DIM>;
using OutTile = Tile<Element, BLOCK_Q, VALUE_DIM>;
using PairTile = Tile<Element, BLOCK_Q, BLOCK_K>;
constexpr int FIRST_BYTES = QueryTile::BYTES > OutTile::BYTES ? QueryTile::BYTES : OutTile::BYTES;

template <bool CAREFUL>
__device__ void attend(const Params& p);

// Not inlined, so that it costs the first pass no registers.
__device__ __noinline__ void attend_carefully(const Params& p) { attend<true>(p); }

template <bool CAREFUL>
__device__ inline void attend(const Params& p) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ bool cleaned[BLOCK_K], redo[BLOCK_Q];
    const QueryTile q_tile(memory);
    const OutTile out_tile(memory);  // takes the place of the queries in the end
    auto k_tile = [&](int stage) {
        return KeyTile(memory + FIRST_BYTES + stage * (KeyTile::BYTES + ValueTile::BYTES));
    };
    auto v_tile = [&](int stage) { return ValueTile(k_tile(stage).base + KeyTile::BYTES); };
    const PairTile p_tile(k_tile(STAGES).base);  // where warps share rows
    const WarpBias<false, MT, NT> bias(p_tile.base + (WARPS_N > 1 ? PairTile::BYTES : 0));

    const int q_blocks = int((p.Nq + BLOCK_Q - 1) / BLOCK_Q);
    const int column_blocks = max(1, int((p.Dv + VALUE_DIM - 1) / VALUE_DIM));
    const Turn turn(q_blocks, int(p.B * p.Hq) * column_blocks, int(p.parts));
    const int column = turn.head % column_blocks * VALUE_DIM, bh = turn.head / column_blocks;
    // Under a causal mask the last queries see most: they go first.
    const int q0 = (p.right < 0 ? turn.block : q_blocks - 1 - turn.block) * BLOCK_Q;
    const int columns = min(VALUE_DIM, int(p.Dv) - column);
    const Head head(p, bh / int(p.Hq), bh % int(p.Hq));
    const RowGroup group(16 * MT);
    const int row0 = group.row0, column0 = group.warp_n * NT * 8;  // first of this warp's scores
    const int value0 = group.warp_n * VT * 8;                      // and of its columns of out

    const Range keys = head.sight.band.keys_of(q0, min(q0 + BLOCK_Q, int(p.Nq)));
    auto load_keys = [&](int k0, int stage) {
        k_tile(stage).template load<THREADS, VECTOR>(head.k + k0 * p.k_at.n, p.k_at.n,
                                                     keys.hi - k0, int(p.D));
        copy_commit();
    };
    auto load_values = [&](int k0, int stage) {
        v_tile(stage).template load<THREADS, VECTOR>(head.v + k0 * p.v_at.n + column, p.v_at.n,
                                                     keys.hi - k0, columns);
        copy_commit();
    };
    auto load_bias = [&](int k0) { bias.load(head.terms, q0 + row0, k0 + column0); };

    q_tile.template load<THREADS, VECTOR>(head.q + q0 * p.q_at.n, p.q_at.n, int(p.Nq) - q0,
                                          int(p.D));
    copy_commit();
    RowState<MT> state;
    Fragment<Sum, MT, VT> acc;
    bool found[MT][2] = {};
    Visits visit(keys.lo / BLOCK_K, (keys.hi + BLOCK_K - 1) / BLOCK_K, [&](int tile) {
        return head.sight.kind(q0, q0 + BLOCK_Q, tile * BLOCK_K, tile * BLOCK_K + BLOCK_K);
    });
    acc.clear();
    // The mask is read a visit ahead: the second product leaves it registers, and covers the wait.
    DenseMask<false, MT, NT> mask;
    auto read_mask = [&] {
        if (HAS_MASK && !visit.done())
            mask.read(head.sight, q0 + row0, visit.tile * BLOCK_K + column0);
    };
    read_mask();
    // One stage: values come during the first product, the next keys during the second. Two: both
    // of the next visit during all of this one. The next bias comes once this one has been added.
    int stage = 0;
    if (!visit.done()) {
        load_keys(visit.tile * BLOCK_K, 0);
        if (STAGES > 1) load_values(visit.tile * BLOCK_K, 0);
        load_bias(visit.tile * BLOCK_K);
    }
    while (!visit.done()) {
        const int k0 = visit.tile * BLOCK_K, kind = visit.kind;
        const KeyTile k = k_tile(stage);
        const ValueTile v = v_tile(stage);
        copy_wait<0>();
        __syncthreads();  // this visit's keys are here, and everybody is done with the last
        visit.next();
        if (STAGES == 1) {
            load_values(k0, 0);
        } else if (!visit.done()) {
            load_keys(visit.tile * BLOCK_K, stage ^= 1);
            load_values(visit.tile * BLOCK_K, stage);
        }
        if constexpr (HAS_MASK) mask.share();
        Scores<false, MT, NT> s(q0 + row0, k0 + column0);
        multiply<HEAD_DIM, STEPS<CAREFUL, HEAD_DIM>>(s, q_tile, row0, k, column0);
        s.apply(head.terms, bias, [](int, int, int, Sum) {});
        if (HAS_MASK || kind == PARTIAL) s.hide(head.sight, mask);
        if (STAGES == 1) {
            copy_wait<0>();
            __syncthreads();  // the values are here, and everybody is done with the keys
            if (!visit.done()) load_keys(visit.tile * BLOCK_K, 0);
        }
        if (!visit.done()) load_bias(visit.tile * BLOCK_K);
        if constexpr (CAREFUL) {
            clean_tiles<THREADS>(cleaned, v);
            s.find(cleaned + column0, found);
        }
        Sum rescale[MT][2];
        state.absorb(s, head.terms.unit(), group, rescale);
        acc.scale_rows(rescale);
        read_mask();
        // Of 16 keys at a time, so that their random bits are computed while others are multiplied.
        auto drop = [&](int n) { s.drop(head.dropout, n); };
        if constexpr (WARPS_N > 1) {
#pragma unroll
            for (int n = 0; n < NT; n += 2) drop(n);
            store_fragment(p_tile, s, row0, column0);
            group.sync();
            multiply_rows<false, BLOCK_K, STEPS<CAREFUL, BLOCK_K>>(acc, p_tile, row0, v, value0);
        } else {
            multiply(acc, s, v, 0, drop);
        }
    }
    copy_wait<0>();
    if (!CAREFUL && __syncthreads_or(!acc.all_finite() || !state.all_finite())) {
        attend_carefully(p);
        return;
    }
    __syncthreads();  // everybody is done with the queries

    if constexpr (CAREFUL) {
        for (int i = threadIdx.x; i < BLOCK_Q; i += THREADS) redo[i] = false;
        __syncthreads();
    }
    state.gather(group);
    const Lane lane;
    const Sum sink = head.sink();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Sum lse;
            const Sum weight = state.finish(m, half, sink, Sum(p.gain), Sum(p.natural), lse);
            bool good = is_finite(weight) && !found[m][half];
#pragma unroll
            for (int n = 0; n < VT; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    acc.x[m][n][e] *= weight;
                    good = good && is_finite(acc.x[m][n][e]);
                }
            const int row = row0 + 16 * m + lane.row(2 * half), i = q0 + row;
            if (CAREFUL && !good) redo[row] = true;
            if (lane.t == 0 && value0 == 0 && i < p.Nq) static_cast<Sum*>(p.lse)[head.row(i)] = lse;
        }
    store_fragment(out_tile, acc, row0, value0);
    __syncthreads();
    out_tile.template store<THREADS, VECTOR>(
        rows_of<Element>(p.out, p.out_at, head.b, head.h) + q0 * p.out_at.n + column, p.out_at.n,
        int(p.Nq) - q0, columns);

    if constexpr (!CAREFUL) return;
    __syncthreads();  // everybody has stored
#pragma unroll 1
    for (int i = threadIdx.x / WARP; i < BLOCK_Q; i += WARPS_M * WARPS_N)
        if (redo[i] && q0 + i < p.Nq) forward_row(p, head.b, head.h, q0 + i);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    forward(const __grid_constant__ Params p) {
    attend<false>(p);
}
