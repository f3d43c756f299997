// Layer 2. GEMMs of a warp for float32 as three GEMMs of float16 numbers (splitting.cuh): the products of two high
// parts, and of a high and a low part. X is in registers, Y a tile of planes.
//
// The tensor core cuts sums toward zero. So sums leave it every 64 terms, and are added in float32.
#pragma once

#include "split_operand.cuh"

// The second operand: both parts of 16 x 8 numbers.
struct SplitColumns {
    Atom<float16>::B high, low;
};

// Loads operands from a tile of planes: an ldmatrix loads both parts of one, or the same part of two. A lane keeps one
// address: others differ by a constant, or by an exclusive or, since tiles are aligned to their swizzle. TRANSPOSED:
// rows of the tile are rows of an operand; otherwise they are its columns.
template <class Planes, bool TRANSPOSED, int ATOMS>
struct SplitLoader {
    static_assert(ATOMS <= 2);
    u32 first;

    __device__ explicit SplitLoader(const Planes& tile) {
        const int lane = threadIdx.x % WARP, own = lane % 16, next = lane / 16;
        const int low = ATOMS == 1 ? next * low_column(0) : 0, atom = ATOMS == 2 ? next * 8 : 0;
        first = tile.address +
                (TRANSPOSED ? Planes::at(own, atom + low) : Planes::at(own % 8 + atom, own / 8 * 8 + low));
    }
    // From a row and a column of the numbers on: multiples of 8 * ATOMS.
    __device__ void load(SplitColumns (&operands)[ATOMS], int row, int column) const {
        u32 r[ATOMS][4];
#pragma unroll
        for (int part = 0; part < ATOMS; ++part) {
            const int byte = 2 * (part ? low_column(column) : high_column(column));
            const u32 address = (first ^ (byte & 127)) + row * Planes::PITCH + (byte & ~127);
            if constexpr (TRANSPOSED)
                load_matrices_transposed(r[part], address);
            else
                load_matrices(r[part], address);
        }
        if constexpr (ATOMS == 1) {
            operands[0] = {{r[0][0], r[0][1]}, {r[0][2], r[0][3]}};
        } else {
#pragma unroll
            for (int n = 0; n < ATOMS; ++n)
                operands[n] = {{r[0][2 * n], r[0][2 * n + 1]}, {r[1][2 * n], r[1][2 * n + 1]}};
        }
    }
};

// The first operand: a warp's 16 rows of a tile of planes, with 16 * K numbers. They stay in shared memory.
template <class Planes, int K>
struct StagedOperand {
    static constexpr int STEPS = K;
    u32 first;

    __device__ StagedOperand(const Planes& tile, int row)
        : first(tile.address + Planes::at(row + threadIdx.x % 16, threadIdx.x % WARP / 16 * 8)) {}

    __device__ SplitStep step(int k) const {
        SplitStep parts;
        load(parts.high, high_column(16 * k));
        load(parts.low, low_column(16 * k));
        return parts;
    }
    __device__ void load(Atom<float16>::A& operand, int column) const {
        const int byte = 2 * column;
        load_matrices(operand.r, (first ^ (byte & 127)) + (byte & ~127));
    }
    // The same operand in registers.
    __device__ SplitOperand<K> held() const {
        SplitOperand<K> operand;
#pragma unroll
        for (int k = 0; k < K; ++k) load(operand.high[k], high_column(16 * k)), load(operand.low[k], low_column(16 * k));
        return operand;
    }
};

// The sums of 16 * MT rows and 8 * NT columns: of products of high parts, and of all others.
template <int MT, int NT>
struct SplitSums {
    Fragment<float, MT, NT> high, low;

    __device__ SplitSums() { high.clear(), low.clear(); }

    // Add the products of step k of X. The two products that share a sum are far apart.
    template <class X>
    __device__ void add(const X (&x)[MT], int k, const SplitColumns (&y)[NT]) {
        SplitStep own[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) own[m] = x[m].step(k);
#pragma unroll
        for (int product = 0; product < 3; ++product)
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    Atom<float16>::mma(product == 1 ? high.x[m][n] : low.x[m][n],
                                       product == 2 ? own[m].low : own[m].high,
                                       product == 0 ? y[n].low : y[n].high);
    }

    // Call use(total, high, low, m, half) for each number of c from atom n0 on, and its two sums.
    template <int ALL, class Use>
    __device__ void for_each(Fragment<float, MT, ALL>& c, int n0, Use use) const {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) use(c.x[m][n0 + n][e], high.x[m][n][e], low.x[m][n][e], m, e / 2);
    }
};

// Atoms of C whose sums are in registers at a time: enough for the tensor core to be busy.
template <int MT>
constexpr int SUM_ATOMS = MT == 1 ? 2 : 1;

// C = X Y^T, with the inverse factor of each row of C. IN_TURN: few loads at a time, to save registers.
template <bool IN_TURN = false, class X, class Planes, int MT, int NT>
__device__ inline void split_multiply(Fragment<float, MT, NT>& c, const X (&x)[MT], const Planes& y,
                                      const float (&inverse)[MT][2]) {
    constexpr int K = X::STEPS, SUM_STEPS = 64 / 16, ATOMS = SUM_ATOMS<MT>;
    const SplitLoader<Planes, false, ATOMS> loader(y);
#pragma unroll
    for (int n0 = 0; n0 < NT; n0 += ATOMS) {
        SplitSums<MT, ATOMS> sums;
#pragma unroll
        for (int k = 0; k < K; ++k) {
            SplitColumns columns[ATOMS];
            loader.load(columns, 8 * n0, 16 * k);
            sums.add(x, k, columns);
            if (IN_TURN && k % 2) __syncwarp();  // otherwise ptxas starts the loads of many steps
            if ((k + 1) % SUM_STEPS != 0 && k + 1 < K) continue;
            sums.for_each(c, n0, [&](float& total, float high, float low, int m, int half) {
                total = k < SUM_STEPS ? high : total + high;
                if (k + 1 == K) total = fmaf(low, inverse[m][half] * LOW_UNIT, total * inverse[m][half]);
            });
            sums.high.clear();
        }
    }
}

// C += X Y, with the inverse factor of each row of the product. Y has up to 64 rows. IN_TURN as above.
template <bool IN_TURN = false, int K, class Planes, int MT, int NT>
__device__ inline void split_multiply_add(Fragment<float, MT, NT>& c, const SplitOperand<K> (&x)[MT], const Planes& y,
                                          const float (&inverse)[MT][2]) {
    static_assert(16 * K <= 64, "terms of a sum");
    constexpr int ATOMS = SUM_ATOMS<MT>;
    const SplitLoader<Planes, true, ATOMS> loader(y);
#pragma unroll
    for (int n0 = 0; n0 < NT; n0 += ATOMS) {
        SplitSums<MT, ATOMS> sums;
#pragma unroll
        for (int k = 0; k < K; ++k) {
            SplitColumns columns[ATOMS];
            loader.load(columns, 16 * k, 8 * n0);
            sums.add(x, k, columns);
        }
        sums.for_each(c, n0, [&](float& total, float high, float low, int m, int half) {
            total = fmaf(low, inverse[m][half] * LOW_UNIT, fmaf(high, inverse[m][half], total));
        });
        if (IN_TURN) __syncwarp();
    }
}
