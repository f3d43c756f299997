// Layer 3. The bias of a warp's scores. If its rows are contiguous and aligned, it is staged: the warp
// copies its part asynchronously to shared memory, and reads it as an accumulator fragment. In Hopper's
// backward kernel one warp copies the parts of all warps into one tile. Otherwise each lane reads single
// elements, or STAGE copies them to shared memory one by one: for kernels that read a tile many times.
#pragma once

#include "score_mod.cuh"

// The bias of MT x NT atoms of scores. Its rows in memory are queries: the columns of TRANSPOSED scores.
template <bool TRANSPOSED, int MT, int NT, bool STAGE = false>
struct WarpBias {
    static constexpr bool ALIGNED = BIAS_ALIGNMENT_BYTES > 0;
    static constexpr bool STAGED = ALIGNED || (STAGE && HAS_BIAS);
    static constexpr bool ONE_TILE = TRANSPOSED && PRODUCER_WARPS > 0;  // shared by all warps
    using Share = Tile<BiasElement, TRANSPOSED ? 8 * NT : 16 * MT,
                       (TRANSPOSED ? 16 * MT : 8 * NT) * (ONE_TILE ? WARPS_M : 1)>;
    static constexpr int BYTES =
        STAGED ? Share::BYTES * (ONE_TILE ? 1 : WARPS_M * WARPS_N) : 0;  // for a group

    Share share;

    __device__ explicit WarpBias(char* memory)
        : share(memory + (STAGED && !ONE_TILE ? warp_of_group() * Share::BYTES : 0)) {}

    // Start to copy the bias from query i and key j on. It has landed when each lane has waited for its
    // copies and the warp has synchronised.
    __device__ void load(const ScoreMod& score_mod, int i, int j) const {
        static_assert(!ONE_TILE);
        if constexpr (STAGED) __syncwarp();  // all lanes have read the previous bias
        if constexpr (ALIGNED) {
            share.template load<WARP, BIAS_ALIGNMENT_BYTES>(
                score_mod.bias + i * score_mod.bias_i + j, score_mod.bias_i, score_mod.Nq - i,
                score_mod.Nk - j, threadIdx.x % WARP);
            copy_commit();
        } else if constexpr (STAGED) {
#pragma unroll 4
            for (int x = threadIdx.x % WARP; x < 16 * MT * 8 * NT; x += WARP) {
                const int r = x / (8 * NT), c = x % (8 * NT);
                const bool inside = i + r < score_mod.Nq && j + c < score_mod.Nk;
                share.element(Share::at(r, c)) =
                    inside ? score_mod.bias[(i + r) * score_mod.bias_i + (j + c) * score_mod.bias_j]
                           : BiasElement{};
            }
        }
    }

    // Copy the tile of all warps, by one warp that has few registers.
    __device__ void load_tile(const ScoreMod& score_mod, int i, int j) const {
        static_assert(ONE_TILE);
        share.template load<WARP, BIAS_ALIGNMENT_BYTES, 2>(
            score_mod.bias + i * score_mod.bias_i + j, score_mod.bias_i, score_mod.Nq - i,
            score_mod.Nk - j, threadIdx.x % WARP);
    }

    // Read the bias of atoms (m, n) and (m, n + 1) of scores that begin at (row, column).
    __device__ void read(Accum (&x)[2][4], const ScoreMod& score_mod, int row, int column, int m,
                         int n) const {
        const Lane lane;
        if constexpr (STAGED) {
            BiasElement own[2][4];
            const int first = ONE_TILE ? threadIdx.x / WARP * 16 * MT : 0;  // this warp's first column
            share.template read<TRANSPOSED, 16 * MT>(own, first, 16 * m, 8 * n);
#pragma unroll
            for (int a = 0; a < 2; ++a)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[a][e] = Accum(widen(own[a][e]));
        } else {
            // Where both rows of the lane begin, and the bytes between columns. The compiler would
            // compute the address of each element from the parameters.
            const int rows = TRANSPOSED ? score_mod.Nk : score_mod.Nq;
            const int columns = TRANSPOSED ? score_mod.Nq : score_mod.Nk;
            const i64 down = (TRANSPOSED ? score_mod.bias_j : score_mod.bias_i) * sizeof(BiasElement);
            i64 right = (TRANSPOSED ? score_mod.bias_i : score_mod.bias_j) * sizeof(BiasElement);
            const int r = row + 16 * m + lane.g, c = column + 8 * n + lane.column(0);
            const char* from = reinterpret_cast<const char*>(score_mod.bias) + r * down + c * right;
            asm volatile("" : "+l"(right));
#pragma unroll
            for (int a = 0; a < 2; ++a)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const char* const at = from + (e / 2 ? 8 * down : 0) + (8 * a + e % 2) * right;
                    const bool inside = r + e / 2 * 8 < rows && c + 8 * a + e % 2 < columns;
                    x[a][e] = inside ? Accum(widen(*reinterpret_cast<const BiasElement*>(at))) : Accum(0);
                }
        }
    }

    // Store dbias from query i and key j on, if the bias is not broadcast: then dbias is contiguous.
    // May overwrite the staged bias.
    __device__ void write(BiasElement* dbias, const ScoreMod& score_mod, int i, int j,
                          const Fragment<Accum, MT, NT>& ds) const {
        static_assert(TRANSPOSED || !STAGED);
        const int rows = score_mod.Nq - i, columns = score_mod.Nk - j;
        dbias += i64(i) * score_mod.Nk + j;
        // Eight lanes have neighbours of a row: whole sectors of 32 bytes, if elements have 4 bytes or more.
        constexpr bool STORE_STAGED = STAGED && sizeof(BiasElement) < 4;
        if constexpr (STORE_STAGED) {
            __syncwarp();  // all lanes have read the bias
            store_transposed(share, ds);
            __syncwarp();
            share.template store<WARP, BIAS_ALIGNMENT_BYTES>(dbias, score_mod.Nk, rows, columns,
                                                             threadIdx.x % WARP);
        } else {
            // `read` says why `down` is hidden.
            const Lane lane;
            const int r = lane.row(0), c = lane.column(0);
            i64 down = score_mod.Nk;
            BiasElement* const to = dbias + (TRANSPOSED ? c * down + r : r * down + c);
            asm volatile("" : "+l"(down));
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int across = 8 * n + e % 2, along = 16 * m + e / 2 * 8;
                        const int row = TRANSPOSED ? across : along, column = TRANSPOSED ? along : across;
                        const bool inside =
                            row + (TRANSPOSED ? c : r) < rows && column + (TRANSPOSED ? r : c) < columns;
                        if (inside) to[row * down + column] = narrow<BiasElement>(ds.x[m][n][e]);
                    }
        }
    }
};

// The bias of a warp's scores in registers, loaded while a GEMM runs.
template <bool TRANSPOSED, int NT>
struct HeldBias {
    static constexpr bool STAGED = false;
    static constexpr int BYTES = 0;
    static_assert(NT == 0 || BIAS_ALIGNMENT_BYTES == 0, "it is not copied to shared memory");
    Accum values[HAS_BIAS ? NT : 1][4];

    __device__ explicit HeldBias(char*) {}

    __device__ void load(const ScoreMod& score_mod, int row, int column) {
        if constexpr (HAS_BIAS) {
            const WarpBias<TRANSPOSED, 1, NT> bias(nullptr);
#pragma unroll
            for (int n = 0; n < NT; n += 2)
                bias.read(reinterpret_cast<Accum(&)[2][4]>(values[n]), score_mod, row, column, 0, n);
        }
    }
    __device__ void read(Accum (&x)[2][4], const ScoreMod&, int, int, int, int n) const {
#pragma unroll
        for (int a = 0; a < 2; ++a)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[a][e] = values[n + a][e];
    }
};
