// Forward pass on Hopper for few rows that share keys (split-KV). The GEMMs are transposed: the 64 rows of a wgmma
// are keys, and its columns are the rows that share them (decode_gemms_sm90.cuh). So the tensor cores compute no empty
// rows. P goes through shared memory, since wgmma has it as its second operand.
//
// A producer thread loads keys and values into circular buffers, and one consumer warpgroup computes. CTAs are
// persistent, and take equal shares of the splits. With several splits the results are partial sums, which
// forward_combine adds up.
#include "decode_gemms_sm90.cuh"
#include "sum_row.cuh"

using Gemms = DecodeGemms<KvElement>;
static_assert(Q_STAGES == 2, "work tiles, each with a full and an empty barrier");
constexpr int FACTOR_BYTES = (int(sizeof(Gemms::Storage)) + 1023) / 1024 * 1024;
static_assert(MIN_BLOCKS_PER_SM * (SHARED_BYTES + STATIC_BYTES + FACTOR_BYTES) <= 227 * 1024, "shared memory of an SM");

// Call visit(n, e) for each of a lane's rows, of which there are two in an atom. Lanes with the same lane.t have the
// same rows.
template <class Visit>
__device__ inline void for_rows(Visit visit) {
#pragma unroll
    for (int n = 0; n < ATOMS; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) visit(n, e);
}

// The row of a lane's element e of atom n.
__device__ inline int row_of(const Lane& lane, int n, int e) { return 8 * n + lane.column(e); }

// A number of each of a lane's rows.
struct OfRows {
    Accum x[ATOMS][2];

    // Call visit(x, n, e) for each.
    template <class Visit>
    __device__ void each(Visit visit) {
        for_rows([&](int n, int e) { visit(x[n][e], n, e); });
    }
    // Combine with the lanes that have the same rows.
    template <class Combine>
    __device__ void reduce_lanes(Combine combine) {
        each([&](Accum& x, int, int) {
#pragma unroll
            for (int step = 4; step < WARP; step *= 2) x = combine(x, __shfl_xor_sync(~0u, x, step));
        });
    }
};

// The numbers of each warp, in shared memory.
struct OfWarps {
    Accum x[4][ROWS];

    __device__ void store(int warp, const Lane& lane, OfRows& own) {
        own.each([&](Accum x, int n, int e) {
            if (lane.g == 0) this->x[warp][row_of(lane, n, e)] = x;
        });
    }
    template <class Combine>
    __device__ Accum all(int row, Combine combine) const {
        Accum all = x[0][row];
#pragma unroll
        for (int warp = 1; warp < 4; ++warp) all = combine(all, x[warp][row]);
        return all;
    }
};

// Where a row over a split is stored: the output if the keys are one split, else partial sums.
struct RowPlace {
    void* to;
    Accum factor;  // which normalises the output

    // Find the place of a row of a key head. One thread `writes` the statistics. Not inlined: the kernel waits for its
    // first instructions, and has four or more calls of this.
    __device__ __noinline__ static RowPlace find(const Params& p, int b, int kv, int row, int split, Accum m, Accum l,
                                                 bool writes) {
        RowSum sum;
        sum.m = m, sum.l = l, sum.max_first = true;
        const SharedRow shared(p, kv, row);
        const Sequence sequence(p, b);
        if (p.splits == 1)
            return {out_row(p, sequence, shared),
                    sum.finish(p, lse_index(p, sequence, shared), shared.h, writes)};
        const i64 index = partial_index(p, sequence, kv, row, split);
        if (writes) sum.store(static_cast<Accum*>(p.partial_sums) + 2 * index);
        return {static_cast<Accum*>(p.partial_out) + index * VALUE_DIM, 1};
    }
    // Store column d.
    __device__ void store(const Params& p, int d, Accum x) const {
        if (p.splits > 1)
            static_cast<Accum*>(to)[d] = x;
        else if (d < p.Dv)
            static_cast<Element*>(to)[d] = narrow<Element>((x + 0) * factor);  // -0 becomes 0, as in forward_combine
    }
};

// Sums over keys: the statistics of this lane's rows, and its part of their columns, 16 rows of each warp.
struct Sums {
    OfRows m, l;
    Transposed columns[VALUE_BLOCKS];

    __device__ void clear(Accum lowest) {
        m.each([&](Accum& x, int, int) { x = lowest; });
        l.each([](Accum& x, int, int) { x = 0; });
        for (auto& block : columns) block.clear();
    }
    // Scale the columns of each row.
    __device__ void scale(const OfRows& factors) {
        for_rows([&](int n, int e) {
            each_column(n, e, [&](int, Accum& x) { x *= factors.x[n][e]; });
        });
    }
    // Call visit(d, x) for each column d of a row.
    template <class Visit>
    __device__ void each_column(int n, int e, Visit visit) {
        const Lane lane;
        const int first = 16 * (threadIdx.x / WARP);
#pragma unroll
        for (int block = 0; block < VALUE_BLOCKS; ++block)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int d = WARPGROUP_ROWS * block + first + Gemms::column(lane, 2 * half);
                visit(d, columns[block].x[0][n][e + 2 * half]);
            }
    }
    // Add the sums over the next keys. `l` must be complete.
    __device__ void add(Sums& next, Accum softmax_scale_log2) {
        for_rows([&](int n, int e) {
            RowSum sum = row(n, e);
            const RowSum::Factors factors = sum.add(next.row(n, e), softmax_scale_log2);
            m.x[n][e] = sum.m, l.x[n][e] = sum.l;
#pragma unroll
            for (int block = 0; block < VALUE_BLOCKS; ++block)
#pragma unroll
                for (int half = 0; half < 4; half += 2) {
                    Accum& x = columns[block].x[0][n][e + half];
                    x = factors.sum(x, next.columns[block].x[0][n][e + half]);
                }
        });
    }
    __device__ RowSum row(int n, int e) const {
        RowSum sum;
        sum.m = m.x[n][e], sum.l = l.x[n][e], sum.max_first = true;
        return sum;
    }
};

// The consumer warpgroup. It computes the sums over each piece of a split from zero, and adds them to the sums over
// the earlier pieces. forward_combine adds pieces in the same way, so results do not depend on the length of a split.
__device__ inline void consume(const Params& p, const Smem& smem, Gemms gemms) {
    __shared__ OfWarps maxima, totals;
    __shared__ Accum repaired[4][2];  // m and l of the row that each warp has recomputed
    const Lane lane;
    const int warp = uniform(threadIdx.x / WARP);
    const ProbTile p_tile{smem.staging(0)};
    Accum* const rows_of_warps = reinterpret_cast<Accum*>(smem.out());
    const int piece_tiles = int(p.piece_keys) / BLOCK_K;
    PipelineState<2> work_pipe;
    PipelineState<STAGES> pipe;
    int loaded_head = -1;  // the key head of the loaded rows, an index among all key heads
    auto sync = [&] { named_barrier_sync<WARPGROUP>(smem.warpgroup_barrier(0)); };
    auto largest_of = [](Accum x, Accum y) { return fmax(x, y); };
    auto sum_of = [](Accum x, Accum y) { return x + y; };

    for (;;) {
        smem.q_full(0, work_pipe.stage).wait(work_pipe.phase);
        const WorkTile& work = smem.storage.work_tiles[work_pipe.stage];  // not copied, to save registers
        if (work.is_end) return;
        const int kv = work.h / int(p.group), rows = int(p.group) * work.Nq(p);
        const int head = work.b * int(p.Hkv) + kv;
        if (head != loaded_head) {
            loaded_head = head;
            gemms.load_queries(p, work);  // all GEMMs with the previous rows are complete
            sync();
        }
        const Accum softmax_scale_log2 = ScoreMod(p, work.b, work.h).softmax_scale_log2();
        Sums total, own;
        total.clear(-infinity<Accum>());

        // Recompute the rows whose sums over keys k0 to k_end - 1 are not finite, four at a time.
        auto repair = [&](int k0, int k_end) {
#pragma unroll 1
            for (int r0 = 0; r0 < rows; r0 += 4) {
                const int r = r0 + warp;
                if (r < rows && !is_finite(totals.all(r, sum_of))) {
                    const SharedRow at(p, kv, r);
                    Range keys = work.window.key_range(at.i, at.i + 1);
                    keys.lo = max(keys.lo, k0), keys.hi = min(keys.hi, k_end);
                    Accum* const to = rows_of_warps + warp * VALUE_DIM;
                    const RowSum sum = sum_row(p, work.b, kv, at, keys, work.window.length, to);
                    if (threadIdx.x % WARP == 0) repaired[warp][0] = sum.m, repaired[warp][1] = sum.l;
                }
                sync();  // the rows are stored
                for_rows([&](int n, int e) {
                    const int i = row_of(lane, n, e) - r0;
                    if (i < 0 || i >= 4 || is_finite(own.l.x[n][e])) return;
                    own.m.x[n][e] = repaired[i][0], own.l.x[n][e] = repaired[i][1];
                    own.each_column(n, e, [&](int d, Accum& x) { x = rows_of_warps[i * VALUE_DIM + d]; });
                });
                sync();  // they have been read
            }
        };

        int first = work.tiles.begin;  // of the piece
#pragma unroll 1
        for (int tile = first; tile < work.tiles.end; ++tile) {
            if (tile == first) own.clear(-largest<Accum>());
            const int k0 = tile * BLOCK_K, key0 = k0 + 16 * warp;
            Transposed s[KEY_BLOCKS];
            const bool partial = work.tiles.is_partial(tile);
            // P is 0 for keys past the end, but 0 x NaN is NaN.
            auto wait_for_values = [&] {
                smem.v_full(pipe.stage).wait(pipe.phase);
                if (partial) zero_rows(smem.v(pipe.stage), work.window.length - k0);
            };
            if (QUANTISED) wait_for_values();
            smem.k_full(pipe.stage).wait(pipe.phase);
            gemms.scores(s, pipe.stage);
            gemms.release_read_keys(smem.k_empty(pipe.stage));
            if (!FOLD || partial) {
#pragma unroll
                for (int n = 0; n < ATOMS * KEY_BLOCKS; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const SharedRow at(p, kv, min(row_of(lane, n % ATOMS, e), rows - 1));
                        const int j = key0 + n / ATOMS * WARPGROUP_ROWS + lane.row(e);
                        Accum& x = s[n / ATOMS].x[0][n % ATOMS][e];
                        if constexpr (!FOLD) {
                            const ScoreMod score_mod(p, work.b, at.h);
                            Accum dsoftcap, dfunction;
                            x = score_mod.score(x, at.i, j, score_mod.bias_of(at.i, j), dsoftcap, dfunction);
                        }
                        const Range range = work.window.key_range(at.i, at.i + 1);
                        if (j < range.lo || j >= range.hi) x = -infinity<Accum>();
                    }
            }

            // The shift of a row, in units of scores, is its maximum.
            OfRows most, rescale;
            most.each([&](Accum& x, int n, int e) {
                x = -infinity<Accum>();
                for (auto& block : s) x = fmax(x, fmax(block.x[0][n][e], block.x[0][n][e + 2]));
            });
            most.reduce_lanes(largest_of);
            maxima.store(warp, lane, most);
            sync();  // the maxima are stored, and the zeros of 8 bits
            gemms.convert_values(pipe.stage);
            bool rises = false;
            own.m.each([&](Accum& x, int n, int e) {
                const Accum before = x;
                x = clip_finite(fmax(x, maxima.all(row_of(lane, n, e), largest_of)));
                rescale.x[n][e] = exp2_of(difference(before, x) * softmax_scale_log2);
                rises = rises || x != before;
            });
            own.l.each([&](Accum& x, int n, int e) {
                auto probability = [&](Accum& s) {
                    const Accum shifted = difference(s, own.m.x[n][e]);
                    return s = exp2_of(fma(shifted, softmax_scale_log2, Accum(FORWARD_P_LOG2)));
                };
                Accum sum = 0;
                for (auto& block : s) sum += probability(block.x[0][n][e]) + probability(block.x[0][n][e + 2]);
                x = fma(x, rescale.x[n][e], sum);
            });
            const Accum factor = gemms.apply_value_factors(s, pipe.stage);
            if (factor != 1) {
                rises = true;
                rescale.each([&](Accum& x, int, int) { x *= factor; });
            }
#pragma unroll
            for (int n = 0; n < KEY_BLOCKS; ++n) {
                typename Atom<Operand>::A probs[ATOMS / 2];
#pragma unroll
                for (int i = 0; i < ATOMS / 2; ++i) probs[i] = Atom<Operand>::a_of(s[n].x[0] + 2 * i);
                store_transposed<Operand>(p_tile, probs, WARPGROUP_ROWS * n + 16 * warp);
            }
            if (!QUANTISED) wait_for_values();
            fence_async_shared();
            sync();  // P and the zeros are stored
            gemms.release_fenced_keys(smem.k_empty(pipe.stage));
            if (__any_sync(~0u, rises)) own.scale(rescale);
            gemms.attend(own.columns, pipe.stage, p_tile);
            Gemms::release_values(smem.v_empty(pipe.stage));
            pipe.advance();

            if (tile + 1 < work.tiles.end && (tile + 1) % piece_tiles) continue;
            const Accum unit = gemms.next_piece();
            if (unit != 1)
                for (auto& block : own.columns) block.scale(unit);
            // 0 times what is not finite is NaN: it marks the row.
            own.l.each([&](Accum& l, int n, int e) {
                own.each_column(n, e, [&](int, Accum& x) { l = fma(x, Accum(0), l); });
            });
            own.l.reduce_lanes(sum_of);
            totals.store(warp, lane, own.l);
            sync();  // the sums are stored, and all GEMMs are done with P
            bool finite = true;
            own.l.each([&](Accum& x, int n, int e) {
                const int r = row_of(lane, n, e);
                x = totals.all(r, sum_of);
                finite = finite && (r >= rows || is_finite(x));
            });
            if (!__all_sync(~0u, finite)) repair(first * BLOCK_K, k0 + BLOCK_K);
            total.add(own, softmax_scale_log2);
            first = tile + 1;
        }

        for_rows([&](int n, int e) {
            const int r = row_of(lane, n, e);
            if (r >= rows) return;
            const bool writes = warp == 0 && lane.g == 0;
            const auto place = RowPlace::find(p, work.b, kv, r, work.split, total.m.x[n][e], total.l.x[n][e], writes);
            total.each_column(n, e, [&](int d, Accum x) { place.store(p, d, x); });
        });
        smem.q_empty(work_pipe.stage).arrive();  // all threads: the producer overwrites it with plain stores
        work_pipe.advance();
    }
}

// The producer thread: publish the splits of this CTA one after the other, and load their keys and values.
template <class Maps>
__device__ inline void produce_splits(const Params& p, const Maps& maps, const Smem& smem, WorkOrder<> order) {
    PipelineState<2> work_pipe;
    PipelineState<STAGES> pipe;
    WorkTile work{};
    u32 request = 0;
    auto publish = [&] {
        smem.q_empty(work_pipe.stage).wait(work_pipe.phase ^ 1);
        smem.storage.work_tiles[work_pipe.stage] = work;
        smem.q_full(0, work_pipe.stage).arrive();
        work_pipe.advance();
    };
#pragma unroll 1
    while (get_work(p, order, work)) {
        const int kv = work.h / int(p.group), begin = work.begin, end = work.end;
        publish();
        if constexpr (GATHERED) {
            if (begin >= end) continue;
            smem.send({work.b, kv, begin, end, end - 1});
            smem.mailbox_empty().wait(request);
            request ^= 1;
        } else {
            KeyLoads<PAGED> loads(p, smem, work, begin * BLOCK_K);
#pragma unroll 1
            for (int tile = begin; tile < end; ++tile, pipe.advance()) {
                loads.look_up();
                const Barrier k_full = smem.k_full(pipe.stage), v_full = smem.v_full(pipe.stage);
                smem.k_empty(pipe.stage).wait(pipe.phase ^ 1);
                loads.load(smem.k(pipe.stage), maps.k, tile * BLOCK_K, kv, k_full);
                smem.v_empty(pipe.stage).wait(pipe.phase ^ 1);
                loads.load(smem.v(pipe.stage), maps.v, tile * BLOCK_K, kv, v_full);
            }
        }
    }
    work.is_end = true;
    publish();
    smem.send({0, -1});
}

extern "C" __global__ void __launch_bounds__(WARPGROUP + WARP * PRODUCER_WARPS, MIN_BLOCKS_PER_SM)
    forward_decode_sm90(const __grid_constant__ Params p, const __grid_constant__ LoadedMaps<GATHERED>::Type maps) {
    extern __shared__ __align__(1024) char tensors[];
    __shared__ SharedStorage storage;
    __shared__ Gemms::Storage factors;
    const Smem smem(tensors, &storage, 0);
    const Gemms gemms(smem, &factors);
    set_up(smem, maps);
    wait_for_prerequisites();
    launch_dependents();
    __syncthreads();
    const int warp = uniform(threadIdx.x / WARP);
    if (warp < 4) {
        consume(p, smem, gemms);
        return;
    }
    const WorkOrder<> order(p);
    if (warp == 4) {
        if (is_first_lane()) produce_splits(p, maps, smem, order);
    } else if (GATHERED) {
        gather(p, smem, warp - 5);
    } else {
        gemms.load_factors(p, order);
    }
}
