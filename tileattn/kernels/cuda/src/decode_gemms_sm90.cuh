// Layer 3. The GEMMs of forward_decode_sm90, with keys and values of 16 or of 8 bits.
//
//     S^T = K Q^T      64 keys x ROWS
//     O^T += V^T P^T   64 columns of v x ROWS
#pragma once

#include "descale.cuh"
#include "fwd_mainloop_sm90.cuh"

static_assert(SPLIT_KV && CONSUMERS == 1 && GROUPS == 1, "a warp has 16 keys of a GEMM");
static_assert(BLOCK_K % WARPGROUP_ROWS == 0 && VALUE_DIM % WARPGROUP_ROWS == 0, "whole GEMMs");

constexpr int ATOMS = ROWS / 8, KEY_BLOCKS = BLOCK_K / WARPGROUP_ROWS, VALUE_BLOCKS = VALUE_DIM / WARPGROUP_ROWS;
using Transposed = Fragment<Accum, 1, ATOMS>;  // 64 keys, or columns of v, x ROWS
using ProbTile = SmemTile<ROWS, BLOCK_K>;
static_assert(OUT_BYTES >= ProbTile::BYTES, "P fits");

// Keys and values of 16 bits: wgmma reads them from shared memory.
template <class T, int = int(sizeof(T))>
struct DecodeGemms {
    const Smem& smem;

    struct Storage {};
    __device__ DecodeGemms(const Smem& smem, Storage*) : smem(smem) {}

    // The column of a block of v that element e of a lane has, counted from the first column of its warp.
    __device__ static int column(const Lane& lane, int e) { return lane.row(e); }

    // Load the rows that share keys.
    __device__ void load_queries(const Params& p, const WorkTile& work) const { load_shared_rows(p, work, smem.q(0)); }

    __device__ void scores(Transposed (&s)[KEY_BLOCKS], int stage) const {
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; ++n)
            gemm_async<Operand, HEAD_DIM>(s[n], smem.k(stage), WARPGROUP_ROWS * n, smem.q(0));
        wgmma_wait<0>();
        for (auto& block : s) fence_operand(accum_registers(block));
    }
    // The keys have been read: only by wgmma, and the GEMM is complete.
    __device__ void release_read_keys(const Barrier& empty) const { release_values(empty); }
    // All warps have read the keys, and fenced their reads.
    __device__ void release_fenced_keys(const Barrier&) const {}
    // Convert values that attend() needs first.
    __device__ void convert_values(int) {}
    // Multiply P by the factors of the values. Returns the factor for the sums of earlier tiles.
    __device__ Accum apply_value_factors(Transposed (&)[KEY_BLOCKS], int) const { return 1; }
    __device__ void attend(Transposed (&sums)[VALUE_BLOCKS], int stage, const ProbTile& probs) const {
#pragma unroll
        for (int n = 0; n < VALUE_BLOCKS; ++n)
            gemm_async_transposed<Operand, true>(sums[n], smem.v(stage), WARPGROUP_ROWS * n, probs);
        wgmma_wait<0>();
        for (auto& block : sums) fence_operand(accum_registers(block));
    }
    // Reset the unit for the next piece. Returns the factor that the sums over the previous piece still need.
    __device__ Accum next_piece() { return 1; }
    // The values have been read: only by wgmma, and the GEMM is complete.
    __device__ static void release_values(const Barrier& empty) {
        if (threadIdx.x == 0) empty.arrive();
    }
    __device__ void load_factors(const Params&, WorkOrder<>) const {}
};

// Keys and values of 8 bits: each warp converts them to operands in registers. The factor warp copies their factors to
// shared memory. P is multiplied by the factors of the values, over a unit that keeps it in the range of float16.
template <class T>
struct DecodeGemms<T, 1> {
    struct Storage {
        float queries[ROWS];  // the factor of each row of q
        float tiles[STAGES][2][BLOCK_K];
    };
    const Smem& smem;
    Storage& storage;
    ValueUnit unit;
    Accum raised;  // the factor for the sums of earlier tiles
    Atom<Operand>::A values[BLOCK_K / 16];  // of the first 64 columns

    __device__ DecodeGemms(const Smem& smem, Storage* storage) : smem(smem), storage(*storage) {}

    // The columns are in the order of load_matrices_transposed: lane.g has a pair of neighbours.
    __device__ static int column(const Lane& lane, int e) { return 2 * lane.g + e / 2; }

    __device__ TileScales scales(int stage) const {
        return TileScales(reinterpret_cast<char*>(storage.tiles[stage]));
    }

    // A tile of q as `::load_queries` stores elements.
    struct Queries {
        const Smem& smem;

        __device__ int at(int row, int column) const {
            const QueryTile tile = smem.q(0);
            return int(tile.chunk(row, 2 * column) - smem.tensors);
        }
        __device__ Operand& element(int offset) const { return *reinterpret_cast<Operand*>(smem.memory + offset); }
    };
    __device__ void load_queries(const Params& p, const WorkTile& work) const {
        const Sequence sequence = work.sequence(p);
        const int kv = work.h / int(p.group), rows = int(p.group) * work.Nq(p);
        ::load_queries(Queries{smem}, storage.queries, rows, int(p.D), [&](int r) {
            return q_row(p, sequence, SharedRow(p, kv, min(r, rows - 1)));
        });
        fence_async_shared();
    }

    __device__ void scores(Transposed (&s)[KEY_BLOCKS], int stage) {
        constexpr int STEPS = HEAD_DIM / 16;
        raised = unit.raise(scales(stage).values);  // here its latency is hidden
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const Lane at;
        const KeyTile tile = smem.k(stage);
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; ++n) {
            Atom<Operand>::A keys[STEPS];
#pragma unroll
            for (int k = 0; k < STEPS; k += 2) {
                u32 r[4];  // 16 columns of eight keys, of the next eight keys; then the next columns
                load_matrices(r, tile.chunk(WARPGROUP_ROWS * n + 16 * warp + lane % 16, 16 * k + lane / 16 * 16));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    u32 two[2];
                    to_halves<false>(two, r[i], T{});
                    keys[k + i / 2].r[i % 2] = two[0], keys[k + i / 2].r[i % 2 + 2] = two[1];
                }
            }
            gemm_async_k<Operand>(s[n], keys, smem.q(0));
            if (HEAD_DIM > 128) wgmma_wait<0>();  // no registers for more operands
        }
        wgmma_wait<0>();
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; ++n) {
            fence_operand(accum_registers(s[n]));
            scale(s[n], scales(stage).keys + WARPGROUP_ROWS * n + 16 * warp, [&](int atom, int e) {
                return storage.queries[8 * atom + at.column(e)];
            });
        }
    }
    __device__ void release_read_keys(const Barrier&) const {}
    __device__ void release_fenced_keys(const Barrier& empty) const {
        if (threadIdx.x == 0) empty.arrive();
    }
    __device__ Accum apply_value_factors(Transposed (&probs)[KEY_BLOCKS], int stage) const {
        const float* const factors = scales(stage).values;
        const Accum inverse = unit.inverse();
#pragma unroll
        for (int n = 0; n < KEY_BLOCKS; ++n) {
            const float* const own = factors + WARPGROUP_ROWS * n + 16 * (threadIdx.x / WARP);
            scale(probs[n], own, [&](int, int) { return inverse; });
        }
        return raised;
    }
    __device__ void convert_values(int stage) { convert(values, stage, 0); }
    __device__ void attend(Transposed (&sums)[VALUE_BLOCKS], int stage, const ProbTile& probs) const {
        gemm_async_k<Operand, true>(sums[0], values, probs);
#pragma unroll
        for (int n = 1; n < VALUE_BLOCKS; ++n) {
            Atom<Operand>::A next[BLOCK_K / 16];
            convert(next, stage, n);
            gemm_async_k<Operand, true>(sums[n], next, probs);
            if (VALUE_BLOCKS > 2) wgmma_wait<0>();
        }
        wgmma_wait<0>();
        for (auto& block : sums) fence_operand(accum_registers(block));
    }
    __device__ Accum next_piece() {
        const Accum factor = unit.unit;
        unit = ValueUnit();
        return factor;
    }
    // This warp has read the stage with plain loads. The fence orders them before the next TMA load.
    __device__ static void release_values(const Barrier& empty) {
        fence_async_shared();
        __syncwarp();
        if (threadIdx.x % WARP == 0) empty.arrive();
    }

    // The factor warp: copy the factors of each tile, in the order in which the producer thread loads tiles.
    __device__ void load_factors(const Params& p, WorkOrder<> order) const {
        constexpr int EACH = BLOCK_K / WARP;
        const int lane = threadIdx.x % WARP;
        PipelineState<STAGES> pipe;
        WorkTile work{};
        while (get_work(p, order, work)) {
            const Sequence sequence = work.sequence(p);
            const int length = work.window.length;
            const Descales descales(p, sequence, work.h / int(p.group));
            KeyRows rows(p, sequence, length);
#pragma unroll 1
            for (int tile = work.begin; tile < work.end; ++tile, pipe.advance()) {
                int pages[EACH], within[EACH];
#pragma unroll
                for (int n = 0; n < EACH; ++n) {
                    rows.find(tile * BLOCK_K + n * WARP + lane);
                    pages[n] = rows.found_page, within[n] = rows.found_row;
                }
                smem.k_empty(pipe.stage).wait(pipe.phase ^ 1);
                smem.v_empty(pipe.stage).wait(pipe.phase ^ 1);
#pragma unroll
                for (int n = 0; n < EACH; ++n) {
                    const int row = n * WARP + lane;
                    rows.found_page = pages[n], rows.found_row = within[n];
                    scales(pipe.stage).load(descales, rows, row, tile * BLOCK_K + row, length);
                }
                smem.k_full(pipe.stage).arrive_after_copies();
                smem.v_full(pipe.stage).arrive_after_copies();
            }
        }
    }

private:
    // Convert 64 columns of a tile of values.
    __device__ void convert(Atom<Operand>::A (&to)[BLOCK_K / 16], int stage, int block) const {
        const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        const ValueTile tile = smem.v(stage);
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; k += 2) {
            u32 r[4];  // eight values each, of 16 columns
            load_matrices_transposed(r, tile.chunk(16 * k + lane, WARPGROUP_ROWS * block + 16 * warp));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 two[2];  // even columns, and odd ones
                to_halves<true>(two, r[i], T{});
                u32* const own = to[k + i / 2].r + i % 2 * 2;
                own[0] = two[0], own[1] = two[1];
            }
        }
    }
    // Multiply the keys of a warp by their factors, and rows by of_row(atom, e).
    template <class OfRow>
    __device__ static void scale(Transposed& x, const float* factors, OfRow of_row) {
        const Lane lane;
        const float two[2] = {factors[lane.g], factors[lane.g + 8]};
#pragma unroll
        for (int n = 0; n < ATOMS; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x.x[0][n][e] *= two[e / 2] * of_row(n, e % 2);
    }
};
