// Forward pass of latent attention (MLA) on Hopper, absorbed: values are the first columns of the keys, so
// each key is loaded once. A CTA computes 64 rows over one split of the keys; a row is a query of one of
// the heads that share a key head. A producer warp loads keys. The score warpgroup computes S and P of all
// rows, and the first half of the columns of O. The value warpgroup reads P from shared memory, and
// computes the second half.
#include "latent_smem_sm90.cuh"

constexpr int NT = BLOCK_K / 8, VT = HALF / 8;

constexpr int SCORE_BARRIER = 1, BOTH_BARRIER = 2;  // named barriers: the score warpgroup, both consumers

struct Maps {
    TensorMap k;
};

// The rows and the split of this CTA. Consecutive CTAs have the blocks of rows of the same split.
struct WorkTile {
    int b, kv, row0, row_end, split, first_query, query_end, end;
    Sequence sequence;
    SlidingWindow window;
    Range keys;  // the keys of the split that some row attends to

    __device__ explicit WorkTile(const Params& p)
        : b(head(p) % int(p.B * p.Hkv) / int(p.Hkv)),
          kv(head(p) % int(p.Hkv)),
          row0(int(blockIdx.x) % blocks(p) * BLOCK_Q),
          row_end(min(row0 + BLOCK_Q, int(p.group * p.Nq))),
          split(head(p) / int(p.B * p.Hkv)),
          first_query(SharedRow(p, kv, row0).i),
          query_end(SharedRow(p, kv, row_end - 1).i + 1),
          sequence(p, b),
          window(p, sequence),
          keys(window.key_range(first_query, query_end)) {
        const int start = split * int(p.split_keys);
        keys.lo = max(keys.lo, start), keys.hi = min(keys.hi, start + int(p.split_keys));
        keys.hi = max(keys.lo, keys.hi);
        end = (keys.hi + BLOCK_K - 1) / BLOCK_K;
        if (is_empty()) end = begin();
    }
    __device__ static int blocks(const Params& p) {
        return (int(p.group * p.Nq) + BLOCK_Q - 1) / BLOCK_Q;
    }
    __device__ static int head(const Params& p) { return int(blockIdx.x) / blocks(p); }

    __device__ bool is_empty() const { return keys.lo >= keys.hi; }
    __device__ int begin() const { return keys.lo / BLOCK_K; }  // first tile
};

// The producer warp: load each half of a tile once it is released. A lane loads a box: the keys of one
// page.
__device__ inline void produce(const Params& p, const Maps& maps, const Smem& smem,
                               const WorkTile& work) {
    const int lane = threadIdx.x % WARP, box = PAGED ? min(int(p.page), BLOCK_K) : BLOCK_K;
    const bool loads = lane * box < BLOCK_K;
    KeyRows rows(p, work.sequence, work.window.length);
    PipelineState<STAGES> pipe;
    rows.find(work.begin() * BLOCK_K + lane * box);
#pragma unroll 1
    for (int tile = work.begin(); tile < work.end; ++tile, pipe.advance()) {
        const int entry = PAGED ? rows.found_page : work.b;
        const int row = PAGED ? rows.found_row : tile * BLOCK_K;
        const u32 to = smem.k(pipe.stage).address + lane * box * KeyTile::PITCH;
        rows.find((tile + 1) * BLOCK_K + lane * box);  // of the next tile
#pragma unroll
        for (int part = SECOND; part >= FIRST; --part) {
            const Barrier full = smem.full(pipe.stage, part);
            constexpr int SLICE = KeyTile::SLICE;
            smem.empty(pipe.stage, part).wait(pipe.phase ^ 1);
            if (lane == 0)
                full.arrive_and_expect_tx((slices_end(part) - slices_begin(part)) * SLICE);
            __syncwarp();
            if (loads)
#pragma unroll
                for (int n = slices_begin(part); n < slices_end(part); ++n)
                    tma_load(to + n * SLICE, maps.k, n * KeyTile::WIDTH, row, work.kv, entry, full);
            __syncwarp();
        }
    }
}

// Zero the keys of a tile that no row attends to: NaN or infinity there would spoil all rows, though P is
// 0. The score warpgroup calls this; its named barrier orders the zeros before the GEMM.
__device__ inline void zero_outside(const KeyTile& tile, int k0, Range keys) {
    constexpr int CHUNKS = VALUE_DIM / 8;
    const u32 zeros[4] = {};
    for (int i = threadIdx.x % WARPGROUP; i < BLOCK_K * CHUNKS; i += WARPGROUP) {
        const int row = i / CHUNKS, key = k0 + row;
        if (key < keys.lo || key >= keys.hi) store_shared(tile.chunk(row, i % CHUNKS * 16), zeros);
    }
    fence_async_shared();
    named_barrier_sync<WARPGROUP>(SCORE_BARRIER);
}

// Issue S = Q K^T, each half once its part of k has landed: the second half first.
__device__ inline void issue_qk(Fragment<Accum, 1, NT>& s, const Smem& smem,
                                const PipelineState<STAGES>& pipe) {
    QueryTile q = smem.q();
    KeyTile k = smem.k(pipe.stage);
    hide(q.address), hide(k.address);  // otherwise all descriptors would stay in registers
    auto& d = accum_registers(s);
    smem.full(pipe.stage, SECOND).wait(pipe.phase);
    discard_operand(d);
    wgmma_fence();
#pragma unroll
    for (int part = SECOND; part >= FIRST; --part) {
        if (part == FIRST) smem.full(pipe.stage, FIRST).wait(pipe.phase);
#pragma unroll
        for (int at = slices_begin(part) * 64; at < slices_end(part) * 64; at += 16)
            wgmma(Element{}, d, q.k_major(0, at), k.k_major(0, at),
                  part == FIRST || at > slices_begin(SECOND) * 64);
    }
    wgmma_commit();
}

// The rows of this thread.
__device__ inline int row_of(int half) {
    return threadIdx.x % WARPGROUP / WARP * 16 + Lane().row(2 * half);
}

// Mark rows with sums that are not finite.
__device__ inline void mark_bad(const Smem& smem, const Fragment<Accum, 1, VT>& acc) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        bool finite = true;
#pragma unroll
        for (int n = 0; n < VT; ++n)
            finite = finite && is_finite(acc.x[0][n][2 * half]) &&
                     is_finite(acc.x[0][n][2 * half + 1]);
        if (!finite) smem.storage.bad[row_of(half)] = 1;
    }
}

// The score warpgroup: softmax of tile j overlaps PV of tile j - 1.
__device__ __forceinline__ void compute_scores(const Params& p, const Smem& smem,
                                               const WorkTile& work, Fragment<Accum, 1, VT>& acc) {
    const int rows = int(p.group * p.Nq);
    auto shared_row = [&](int half) {
        return SharedRow(p, work.kv, min(work.row0 + row_of(half), rows - 1));
    };
    Range attended[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = shared_row(half).i;
        attended[half] = work.window.key_range(i, i + 1);
        attended[half].lo = max(attended[half].lo, work.keys.lo);
        attended[half].hi = min(attended[half].hi, work.keys.hi);
    }
    const Accum softmax_scale_log2 = ScoreMod(p, work.b, 0).softmax_scale_log2();
    Fragment<Accum, 1, NT> s;
    Atom<Element>::A probs[BLOCK_K / 16];
    RowState<1> state;
    Accum rescale[1][2];
    PipelineState<STAGES> k_pipe, v_pipe;
    u32 p_phase = 0;

    auto softmax = [&](int tile) {
        const int k0 = tile * BLOCK_K;
        const bool full = work.window.is_full(work.first_query, work.query_end, k0, k0 + BLOCK_K);
        if (!FOLD || !full || k0 < work.keys.lo || k0 + BLOCK_K > work.keys.hi) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const SharedRow row = shared_row(half);
                const ScoreMod score_mod(p, work.b, row.h);
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        Accum& x = s.x[0][n][e];
                        const int j = k0 + 8 * n + Lane().column(e);
                        Accum dsoftcap, dfunction;
                        if constexpr (!FOLD)
                            x = score_mod.score(x, row.i, j, Accum(0), dsoftcap, dfunction);
                        if (j < attended[half].lo || j >= attended[half].hi) x = -infinity<Accum>();
                    }
            }
            if (k0 < work.keys.lo || k0 + BLOCK_K > work.keys.hi)
                zero_outside(smem.k(k_pipe.stage), k0, work.keys);
        }
        k_pipe.advance();
        state.update(s, softmax_scale_log2, LoneWarp(), rescale);
    };
    // Publish P to both warpgroups, once the value warpgroup has read P of the previous tile.
    auto publish_p = [&] {
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; ++i) probs[i] = Atom<Element>::a_of(s.x[0] + 2 * i);
        smem.p_empty().wait(p_phase ^ 1);
        p_phase ^= 1;
        const int lane = threadIdx.x % WARP;
        const u32 to = smem.p().address + (threadIdx.x / WARP * 16 + lane % 16) * 128;
#pragma unroll
        for (int i = 0; i < BLOCK_K / 16; ++i)
            store_matrices(to + ((2 * i + lane / 16) ^ lane % 8) * 16, probs[i].r);
        if (Lane().t == 0)
            smem.storage.rescale[row_of(0)] = rescale[0][0],
            smem.storage.rescale[row_of(1)] = rescale[0][1];
        fence_async_shared();
        smem.p_full().arrive();
    };
    auto issue_pv = [&] { gemm_async<Element>(acc, probs, smem.k(v_pipe.stage)); };
    auto finish_pv = [&] {
        warpgroup_wait<0>(acc);
        release(smem.empty(v_pipe.stage, FIRST));
        v_pipe.advance();
    };

    issue_qk(s, smem, k_pipe);
    warpgroup_wait<0>(s);
    softmax(work.begin());
    publish_p();
#pragma unroll 1
    for (int tile = work.begin() + 1; tile < work.end; ++tile) {
        issue_qk(s, smem, k_pipe);
        issue_pv();
        warpgroup_wait<1>(s);
        softmax(tile);
        order_after(state.l[0][0] + state.l[0][1] < 0);
        finish_pv();
        publish_p();
        acc.scale_rows(rescale);
    }
    issue_pv();
    finish_pv();
    state.reduce_sums(LoneWarp());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        RowSum own;
        own.m = state.m[0][half], own.l = state.l[0][half], own.max_first = state.needs_max_first(0, half);
        if (Lane().t == 0) own.store(smem.storage.row_sums[row_of(half)]);
    }
}

// The value warpgroup.
__device__ __forceinline__ void multiply_values(const Smem& smem, const WorkTile& work,
                                                Fragment<Accum, 1, VT>& acc) {
    PipelineState<STAGES> pipe;
    u32 p_phase = 0;
    auto& d = accum_registers(acc);
#pragma unroll 1
    for (int tile = work.begin(); tile < work.end; ++tile, pipe.advance(), p_phase ^= 1) {
        smem.full(pipe.stage, SECOND).wait(pipe.phase);
        smem.p_full().wait(p_phase);
        const Accum rescale[1][2] = {
            {smem.storage.rescale[row_of(0)], smem.storage.rescale[row_of(1)]}};
        acc.scale_rows(rescale);
        fence_operand(d);
        wgmma_fence();
#pragma unroll
        for (int at = 0; at < BLOCK_K; at += 16)
            wgmma(Element{}, d, smem.p().k_major(0, at), smem.k(pipe.stage).mn_major(at, HALF),
                  true);
        wgmma_commit();
        warpgroup_wait<0>(acc);
        release(smem.empty(pipe.stage, SECOND));
        release(smem.p_empty());
    }
}

// Where the sums of a row are stored: with several splits unnormalised in partial_out, otherwise normalised
// in out.
struct RowTarget {
    Accum* partial = nullptr;
    Element* out = nullptr;
    Accum inverse = 1;
    int columns;

    // One thread of each row `writes` its sum or its lse.
    __device__ RowTarget(const Params& p, const WorkTile& work, int r, const RowSum& sum, bool writes)
        : columns(int(p.Dv)) {
        const SharedRow row(p, work.kv, work.row0 + r);
        if (p.splits > 1) {
            const i64 index = partial_index(p, work.sequence, work.kv, work.row0 + r, work.split);
            partial = static_cast<Accum*>(p.partial_out) + index * VALUE_DIM;
            if (writes) sum.store(static_cast<Accum*>(p.partial_sums) + 2 * index);
        } else {
            out = out_row(p, work.sequence, row);
            inverse = sum.finish(p, lse_index(p, work.sequence, row), row.h, writes);
        }
    }

    // Store N pairs of neighbouring columns: pair(n) at column + STEP * n.
    template <int STEP, int N, class Pair>
    __device__ void store(int column, Pair pair) const {
        if (partial) {
#pragma unroll
            for (int n = 0; n < N; ++n)
                *reinterpret_cast<float2*>(partial + column + STEP * n) = pair(n);
            return;
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float2 x = pair(n);
            const int d = column + STEP * n;
            if (d + 1 < columns)
                *reinterpret_cast<u32*>(out + d) = pack<Element>(x.x * inverse, x.y * inverse);
        }
        if (columns % 2 == 0) return;
#pragma unroll
        for (int n = 0; n < N; ++n)
            if (column + STEP * n + 1 == columns)
                out[columns - 1] = narrow<Element>(pair(n).x * inverse);
    }
};

// True if a row must be recomputed: its output is not finite although its denominator is. Then it attends
// to an infinity with P = 0, or its tile has a non-finite value to which only other rows attend.
__device__ inline bool needs_repair(const Smem& smem, int r) {
    return smem.storage.bad[r] && is_finite(smem.storage.row_sums[r][1]);
}

// Store this warpgroup's columns of all rows that need no repair. Addresses are computed once for each row:
// one for each pair of columns would be more code than the instruction cache holds.
__device__ inline void store_columns(const Params& p, const Smem& smem, const WorkTile& work,
                                     int column0, const Fragment<Accum, 1, VT>& acc) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row_of(half);
        if (work.row0 + r >= work.row_end || needs_repair(smem, r)) continue;
        const RowTarget target(p, work, r, RowSum::load(smem.storage.row_sums[r]),
                               column0 == 0 && Lane().t == 0);
        target.store<8, VT>(column0 + Lane().column(0), [&](int n) {
            return float2{acc.x[0][n][2 * half], acc.x[0][n][2 * half + 1]};
        });
    }
}

// Compute one row over the keys of the split, by one warp and without wgmma. Keys that are masked out or
// have a score of -infinity are skipped. sums[n] has columns 64 * n + 2 * lane and the next one.
__device__ inline RowSum sum_row(const Params& p, const WorkTile& work, const SharedRow& row,
                                 Accum (&sums)[VALUE_DIM / (2 * WARP)][2]) {
    const int lane = threadIdx.x % WARP;
    Range keys = work.window.key_range(row.i, row.i + 1);
    keys.lo = max(keys.lo, work.keys.lo), keys.hi = min(keys.hi, work.keys.hi);
    const ScoreMod score_mod(p, work.b, row.h);
    const Element* const q = q_row(p, work.sequence, row);
    const Element* const k = static_cast<const Element*>(p.k) + work.kv * p.k_at.h;
    KeyRows rows(p, work.sequence, work.window.length);
    auto key_row = [&](int j) {
        rows.find(j);
        return rows.row(k, p.k_at, j, 0);
    };
    auto score = [&](const Element* key, int j) {
        Accum product = 0, dsoftcap, dfunction;
#pragma unroll 1
        for (int d = lane; d < p.D; d += WARP)
            product = fma(Accum(widen(q[d])), Accum(widen(key[d])), product);
        return score_mod.score(warp_sum(product), row.i, j, Accum(0), dsoftcap, dfunction);
    };
    RowSum sum;
    sum.max_first = true;
#pragma unroll 1
    for (int j = keys.lo; j < keys.hi; ++j) sum.m = fmax(sum.m, score(key_row(j), j));
    sum.m = clip_finite(sum.m);
#pragma unroll
    for (auto& two : sums) two[0] = two[1] = 0;
#pragma unroll 1
    for (int j = keys.lo; j < keys.hi; ++j) {
        const Element* const key = key_row(j);
        const Accum s = score(key, j);
        if (s == -infinity<Accum>()) continue;
        const Accum weight = exp2_of(difference(s, sum.m) * score_mod.softmax_scale_log2()) *
                             Accum(1 << FORWARD_P_LOG2);
        sum.l += weight;
#pragma unroll
        for (int n = 0; n < VALUE_DIM / (2 * WARP); ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int d = 2 * WARP * n + 2 * lane + e;
                if (d < p.Dv) sums[n][e] = fma(weight, Accum(widen(key[d])), sums[n][e]);
            }
    }
    return sum;
}

__device__ inline void repair_rows(const Params& p, const Smem& smem, const WorkTile& work) {
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int r = threadIdx.x / WARP; r < work.row_end - work.row0; r += THREADS / WARP) {
        if (!needs_repair(smem, r)) continue;
        constexpr int N = VALUE_DIM / (2 * WARP);
        Accum sums[N][2];
        const RowSum sum = sum_row(p, work, SharedRow(p, work.kv, work.row0 + r), sums);
        const RowTarget target(p, work, r, sum, lane == 0);
        target.store<2 * WARP, N>(2 * lane, [&](int n) { return float2{sums[n][0], sums[n][1]}; });
    }
}

// Load the queries, and zeros for missing rows and columns. Each warp loads a row at a time.
__device__ inline void load_queries(const Params& p, const Smem& smem, const WorkTile& work) {
    const int rows = work.row_end - work.row0, bytes = int(p.D) * int(sizeof(Element));
#pragma unroll 1
    for (int r = threadIdx.x / WARP; r < BLOCK_Q; r += THREADS / WARP) {
        const SharedRow row(p, work.kv, work.row0 + min(r, rows - 1));
        const char* const from = reinterpret_cast<const char*>(q_row(p, work.sequence, row));
#pragma unroll
        for (int n = 0; n < (HEAD_DIM / 8 + WARP - 1) / WARP; ++n) {
            const int byte = (n * WARP + threadIdx.x % WARP) * 16;
            const int valid = r < rows ? min(max(bytes - byte, 0), 16) : 0;
            if (byte < HEAD_DIM * int(sizeof(Element)))
                copy_async<16>(smem.q().chunk(r, byte), valid ? from + byte : from, valid);
        }
    }
    copy_commit();
    copy_wait<0>();
    fence_async_shared();
    named_barrier_sync<THREADS>(BOTH_BARRIER);
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * WARPGROUP, 1)
    forward_latent_sm90(const __grid_constant__ Params p, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage;
    const Smem smem{shared_address(tensors), storage};
    const int warpgroup = warpgroup_index();
    wait_for_prerequisites();
    const WorkTile work(p);
    if (work.is_empty() && p.splits > 1) return;  // forward_combine does not read the sums of an empty split
    if (threadIdx.x == 0) smem.init();
    if (threadIdx.x < BLOCK_Q) {
        storage.bad[threadIdx.x] = 0;
        RowSum().store(storage.row_sums[threadIdx.x]);
    }
    if (threadIdx.x == CONSUMER_THREADS) prefetch_tensormap(maps.k);
    __syncthreads();
    if (warpgroup == CONSUMERS) {
        reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x < CONSUMER_THREADS + WARP) produce(p, maps, smem, work);
        return;
    }
    reg_alloc<CONSUMER_REGISTERS>();
    load_queries(p, smem, work);
    Fragment<Accum, 1, VT> acc;
    acc.clear();
    if (!work.is_empty()) {
        if (warpgroup == 0)
            compute_scores(p, smem, work, acc);
        else
            multiply_values(smem, work, acc);
        mark_bad(smem, acc);
    }
    named_barrier_sync<THREADS>(BOTH_BARRIER);  // row_sums and bad are stored
    store_columns(p, smem, work, warpgroup * HALF, acc);
    repair_rows(p, smem, work);
}
