// Forward pass for few queries (split-KV). A CTA computes a block of rows over one split of the keys of a
// key head; a row is a query of one of the heads that share the keys. The warps form WARPS_N slices. Slice
// n computes every WARPS_N-th key tile, with its own stages and sums, and the sums are added up at the end.
// Which keys a slice computes depends only on their indices, so the bits of a row do not depend on the
// batch.
#include "descale.cuh"
#include "sum_row.cuh"

constexpr int MT = BLOCK_Q / (16 * WARPS_M), NT = BLOCK_K / 8, VT = VALUE_DIM / 8;
constexpr int SLICE_THREADS = WARP * WARPS_M;
constexpr int PART = 16;  // keys of a tile that are loaded by strides if they are in one page
static_assert(STAGES > 1 && BLOCK_K <= WARP, "tiles are loaded ahead; a lane looks up one key");

using QueryTile = Tile<Operand, BLOCK_Q, HEAD_DIM>;
using KeyTile = Tile<KvElement, BLOCK_K, HEAD_DIM>;
using ValueTile = Tile<KvElement, BLOCK_K, VALUE_DIM>;

// At the end the sums of the slices overlay the tiles.
constexpr int SUM_PITCH = VALUE_DIM + 8;

// Call visit(element, m, half, column) for all elements of a lane.
template <int N, class Visit>
__device__ inline void for_each(Fragment<Accum, MT, N>& c, Visit visit) {
    const Lane lane;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e)
                    visit(c.x[m][n][e], m, half, 8 * n + lane.column(e));
}

// Return a bit for each key of a tile that has a non-finite value. Each warp checks the whole tile.
__device__ inline u32 non_finite_rows(const ValueTile& v, const TileScales& scales) {
    u32 bad = 0;
    for (int row = 0; row < BLOCK_K; ++row) {
        bool finite = !QUANTISED || is_finite(scales.values[row]);
        for (int d = threadIdx.x % WARP; d < VALUE_DIM; d += WARP)
            finite = finite && is_finite(widen(v.element(ValueTile::at(row, d))));
        if (!__all_sync(~0u, finite)) bad |= 1u << row;
    }
    return bad;
}
__device__ inline void zero_non_finite(const ValueTile& v, const TileScales& scales, int slice_thread) {
    if (QUANTISED && slice_thread < BLOCK_K && !is_finite(scales.values[slice_thread]))
        scales.values[slice_thread] = 0;
    for (int i = slice_thread; i < BLOCK_K * VALUE_DIM; i += SLICE_THREADS) {
        KvElement& x = v.element(ValueTile::at(i / VALUE_DIM, i % VALUE_DIM));
        if (!is_finite(widen(x))) x = KvElement{};
    }
}

// FEW: this kernel takes the packed sequences with few rows, and splits them. WHOLE: it takes the other packed
// sequences, and splits none.
constexpr bool FEW = PACKED && BLOCK_Q == PACKED_ROWS, WHOLE = PACKED && !FEW;

// The rows and the split of a CTA.
struct WorkTile {
    int b, kv, row0, split;

    __device__ explicit WorkTile(const Params& p) {
        if constexpr (FEW) {
            const int heads = int(p.entries * p.Hkv), head = int(blockIdx.x) % heads;
            b = head / int(p.Hkv), kv = head % int(p.Hkv), row0 = 0, split = int(blockIdx.x) / heads;
            return;
        }
        const int blocks = block_count<BLOCK_Q>(p, p.group * p.Nq), heads = int(p.B * p.Hkv);
        const int head = int(blockIdx.x) / blocks;
        const HeadBlock<BLOCK_Q> at(p, p.query_ends(), int(p.Hkv), head % heads,
                                    int(blockIdx.x) % blocks, int(p.group));
        b = at.b, kv = at.h, row0 = at.block * BLOCK_Q, split = head / heads;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    forward_split(const __grid_constant__ Params p) {
    overlap_launches();
    extern __shared__ __align__(1024) char memory[];
    __shared__ Accum row_sums[WARPS_N][BLOCK_Q][2];
    __shared__ float query_factors[QUANTISED ? BLOCK_Q : 1];
    const WorkTile work(p);
    const Sequence sequence(p, work.b);
    const int rows = int(p.group * sequence.Nq), row_end = min(work.row0 + BLOCK_Q, rows);
    // There is no such block, or another kernel computes this sequence.
    if (PACKED && (work.row0 >= rows || FEW != (rows <= PACKED_ROWS) || rows > int(p.max_split_rows)))
        return;
    const int splits = WHOLE ? 1 : int(p.splits);
    const SlidingWindow window(p, sequence);
    const int first_query = SharedRow(p, work.kv, work.row0).i;
    const int query_end = SharedRow(p, work.kv, row_end - 1).i + 1;
    Range keys = window.key_range(first_query, query_end);
    if constexpr (!WHOLE) {
        const int split_start = work.split * int(p.split_keys);
        keys.lo = max(keys.lo, split_start), keys.hi = min(keys.hi, split_start + int(p.split_keys));
    }
    if (keys.lo >= keys.hi && splits > 1) return;  // forward_combine does not read the sums of an empty split

    const int warp = threadIdx.x / WARP, warp_m = warp % WARPS_M, slice = warp / WARPS_M;
    const Lane lane;
    const QueryTile q_tile(memory);
    auto k_tile = [&](int stage) {
        constexpr int STAGE = KeyTile::BYTES + ValueTile::BYTES + TileScales::BYTES;
        return KeyTile(memory + QueryTile::BYTES + (slice * STAGES + stage) * STAGE);
    };
    auto v_tile = [&](int stage) { return ValueTile(k_tile(stage).base + KeyTile::BYTES); };
    auto scales = [&](int stage) { return TileScales(v_tile(stage).base + ValueTile::BYTES); };
    auto sync_slice = [&] {
        if constexpr (WARPS_M == 1)
            __syncwarp();
        else
            asm volatile("bar.sync %0, %1;" ::"r"(1 + slice), "n"(SLICE_THREADS) : "memory");
    };

    KeyRows key_rows(p, sequence, window.length);
    const Descales descales(p, sequence, work.kv);
    const KvElement* const k = static_cast<const KvElement*>(p.k) + work.kv * p.k_at.h;
    const KvElement* const v = static_cast<const KvElement*>(p.v) + work.kv * p.v_at.h;
    const int slice_thread = threadIdx.x % SLICE_THREADS;
    const bool has_parts_in_pages = !PAGED || int(p.page) % PART == 0;
    auto load_tile = [&](int tile, int stage) {
        const int k0 = tile * BLOCK_K;
        if (k0 < keys.hi) {
            auto load = [&](const auto& tile, const KvElement* first, const Rows& at, int columns) {
                if (has_parts_in_pages)
#pragma unroll
                    for (int part = 0; part < BLOCK_K; part += PART)
                        tile.template part<PART>(part).template load<SLICE_THREADS, ALIGNMENT_BYTES>(
                            key_rows.row(first, at, k0 + part, part), at.n, keys.hi - k0 - part,
                            columns, slice_thread);
                else
                    tile.template load_rows<SLICE_THREADS, ALIGNMENT_BYTES>(
                        [&](int row) { return key_rows.row(first, at, k0 + row, row); }, keys.hi - k0,
                        columns, slice_thread);
            };
            load(k_tile(stage), k, p.k_at, int(p.D));
            load(v_tile(stage), v, p.v_at, int(p.Dv));
            if (QUANTISED)
                scales(stage).load(descales, key_rows, slice_thread, k0 + slice_thread, keys.hi);
        }
        copy_commit();
        key_rows.find(k0 + WARPS_N * BLOCK_K + int(threadIdx.x) % WARP);  // for the next tile
    };
    // The first tile of this slice. Its next one is WARPS_N tiles further.
    const int begin = keys.lo / BLOCK_K;
    const int first_tile = begin + (slice + WARPS_N - begin % WARPS_N) % WARPS_N;
    constexpr bool CONVERTS_Q = QUANTISED && IS_16_BIT;
    auto query = [&](int r) {
        const SharedRow row(p, work.kv, min(work.row0 + r, rows - 1));
        return q_row(p, sequence, row);
    };
    auto load_first_tiles = [&](bool with_queries) {
        key_rows.find(first_tile * BLOCK_K + int(threadIdx.x) % WARP);
#pragma unroll 1
        for (int n = 0; n < STAGES - 1; ++n) {
            load_tile(first_tile + n * WARPS_N, n);
            if (n > 0 || !with_queries || CONVERTS_Q) continue;
            q_tile.template load_rows<THREADS, ALIGNMENT_BYTES>(query, row_end - work.row0, int(p.D));
            copy_commit();
        }
    };
    load_first_tiles(true);  // as early as possible: each split waits for them
    if constexpr (CONVERTS_Q)
        load_queries(q_tile, query_factors, row_end - work.row0, int(p.D), query);

    // The rows of this lane: two of each atom.
    const int row0 = 16 * MT * warp_m;
    auto row_of = [&](int m, int half) {
        const int row = work.row0 + row0 + 16 * m + lane.row(2 * half);
        return SharedRow(p, work.kv, min(row, rows - 1));
    };
    Range attended[MT][2];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row_of(m, half).i;
            attended[m][half] = window.key_range(i, i + 1);
        }

    // Apply score modifiers and masks.
    auto finish_scores = [&](Fragment<Accum, MT, NT>& s, int k0) {
        const bool full = !HAS_MASK && !HAS_MASK_MOD &&
                          window.is_full(first_query, query_end, k0, k0 + BLOCK_K) &&
                          k0 + BLOCK_K <= keys.hi;
        if (FOLD && full) return;
        for_each(s, [&](Accum& x, int m, int half, int column) {
            const SharedRow row = row_of(m, half);
            const int j = k0 + column, there = min(j, int(p.Nk) - 1);
            if constexpr (!FOLD) {
                const ScoreMod score_mod(p, work.b, row.h);
                Accum dsoftcap, dfunction;
                x = score_mod.score(x, row.i, there, score_mod.bias_of(row.i, there), dsoftcap,
                                    dfunction);
            }
            const Range range = attended[m][half];
            bool visible = j >= max(range.lo, keys.lo) && j < min(range.hi, keys.hi);
            if constexpr (HAS_MASK || HAS_MASK_MOD)
                visible = visible && AttentionMask(p, work.b, row.h).visible(row.i, there);
            if (!visible) x = -infinity<Accum>();
        });
    };
    RowState<MT> state;
    Fragment<Accum, MT, VT> acc;
    const Accum softmax_scale_log2 = ScoreMod(p, work.b, 0).softmax_scale_log2();

    // Go through the tiles. A non-finite value in v spoils rows that do not attend to it. If that happens,
    // the second round, `clean`, puts zeros in its place. `good` has a bit for each row that is right.
    constexpr u32 ALL = (1u << (2 * MT)) - 1;
    u32 good = ~0u;
    for (bool clean = false;; clean = true, load_first_tiles(false)) {
        state = RowState<MT>(), acc.clear(), good = ~0u;
        ValueUnit unit;
        copy_wait<STAGES - 2>();
        __syncthreads();  // the queries have landed
        Accum query_factor[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                query_factor[m][half] =
                    CONVERTS_Q ? Accum(query_factors[row0 + 16 * m + lane.row(2 * half)]) : Accum(1);
        int stage = 0;
#pragma unroll 1
        for (int tile = first_tile; tile * BLOCK_K < keys.hi; tile += WARPS_N) {
            copy_wait<STAGES - 2>();
            sync_slice();  // the tile has landed, and all warps are done with the stage that is loaded next
            load_tile(tile + (STAGES - 1) * WARPS_N, stage == 0 ? STAGES - 1 : stage - 1);
            const int k0 = tile * BLOCK_K;
            Fragment<Accum, MT, NT> s;
            s.clear();
            multiply_keys<HEAD_DIM>(s, q_tile, row0, k_tile(stage));
            if constexpr (QUANTISED)
                scale_columns(s, scales(stage).keys,
                              [&](int m, int half) { return query_factor[m][half]; });
            finish_scores(s, k0);
            if (clean) {
                const u32 bad = non_finite_rows(v_tile(stage), scales(stage));
                sync_slice();  // all warps have checked the tile
                if (bad) zero_non_finite(v_tile(stage), scales(stage), slice_thread);
                sync_slice();  // the zeros are stored
                for_each(s, [&](Accum x, int m, int half, int column) {
                    if (bad >> column & 1 && x != -infinity<Accum>()) good &= ~(1u << (2 * m + half));
                });
            }
            Accum rescale[MT][2];
            state.update(s, softmax_scale_log2, LoneWarp(), rescale);
            acc.scale_rows(rescale);
            if constexpr (QUANTISED) {
                const Accum factor = unit.raise(scales(stage).values);
                if (factor != 1) acc.scale(factor);
                scale_columns(s, scales(stage).values, [&](int, int) { return unit.inverse(); });
            }
            multiply_values<Operand>(acc, s, v_tile(stage));
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        }
        if constexpr (QUANTISED) acc.scale(unit.unit);
        copy_wait<0>();
        __syncthreads();  // all slices are done with their tiles
        state.reduce_sums(LoneWarp());
        for_each(acc, [&](Accum x, int m, int half, int) {
            if (!is_finite(x) || !is_finite(state.l[m][half])) good &= ~(1u << (2 * m + half));
        });
        good &= __shfl_xor_sync(~0u, good, 1);
        good &= __shfl_xor_sync(~0u, good, 2);
        if (clean || !__syncthreads_or((good & ALL) != ALL)) break;
    }

    // Add up the sums of the slices, row by row. A denominator of infinity marks a row that is not right:
    // sum_row recomputes it.
    Accum* const sums = reinterpret_cast<Accum*>(memory);
    auto sums_of = [&](int n, int row) { return sums + (n * BLOCK_Q + row) * SUM_PITCH; };
    for_each(acc, [&](Accum x, int m, int half, int column) {
        const int d = QUANTISED ? value_column<Operand>(column) : column;
        sums_of(slice, row0 + 16 * m + lane.row(2 * half))[d] = x;
    });
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            RowSum own;
            own.m = state.m[m][half], own.max_first = state.needs_max_first(m, half);
            own.l = good >> (2 * m + half) & 1 ? state.l[m][half] : infinity<Accum>();
            if (lane.t == 0) own.store(row_sums[slice][row0 + 16 * m + lane.row(2 * half)]);
        }
    __syncthreads();  // all sums are stored
#pragma unroll 1
    for (int r = warp; r < row_end - work.row0; r += WARPS_M * WARPS_N) {
        const SharedRow row(p, work.kv, work.row0 + r);
        RowSum total;
        bool finite = true;
        for (int n = 0; n < WARPS_N; ++n) {
            const RowSum own = RowSum::load(row_sums[n][r]);
            finite = finite && is_finite(own.l);
            total.raise(own, softmax_scale_log2);
        }
        if (finite) {
            Accum factors[WARPS_N];
            const RowSum largest = total;
            total.l = 0;
#pragma unroll
            for (int n = 0; n < WARPS_N; ++n) {
                const RowSum own = RowSum::load(row_sums[n][r]);
                factors[n] = own.factor(largest, softmax_scale_log2);
                total.l = fma(own.l, factors[n], total.l);
            }
            for (int d = threadIdx.x % WARP; d < VALUE_DIM; d += WARP) {
                Accum all = 0;
#pragma unroll
                for (int n = 0; n < WARPS_N; ++n) all = fma(sums_of(n, r)[d], factors[n], all);
                sums_of(0, r)[d] = all;
            }
        } else {
            Range own = window.key_range(row.i, row.i + 1);
            own.lo = max(own.lo, keys.lo), own.hi = min(own.hi, keys.hi);
            total = sum_row(p, work.b, work.kv, row, own, window.length, sums_of(0, r));
        }
        const bool whole = splits == 1;
        const i64 index = partial_index(p, sequence, work.kv, work.row0 + r, work.split);
        Accum* const partial = static_cast<Accum*>(p.partial_out) + index * VALUE_DIM;
        Element* const out = out_row(p, sequence, row);
        const Accum inverse =
            whole ? total.finish(p, lse_index(p, sequence, row), row.h) : Accum(1);
        for (int d = threadIdx.x % WARP; d < VALUE_DIM; d += WARP) {
            const Accum x = sums_of(0, r)[d] * inverse;
            if (!whole)
                partial[d] = x;
            else if (d < p.Dv)
                out[d] = narrow<Element>(x);
        }
        if (!whole && threadIdx.x % WARP == 0)
            total.store(static_cast<Accum*>(p.partial_sums) + 2 * index);
    }
}
