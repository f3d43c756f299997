// Layer 3. Keys and values of 8 bits in split-KV: their factors, and q as float16 operands. Scores are
// multiplied by the factor of the key, P by that of the value, as in spec.py.
#pragma once

#include "quantised.cuh"
#include "splits.cuh"

// The factors of the keys, or values, of a head.
struct Descale {
    const float* first;
    i64 page_step, row_step;

    __device__ Descale(const float* data, const Rows& at, bool by_row, const Sequence& sequence, i64 kv)
        : first(data + kv * at.h), page_step(by_row && PAGED ? at.b : 0), row_step(at.n) {
        if (!by_row)
            first += sequence.b * at.b;
        else if (!PAGED)
            first += sequence.entry() * at.b + sequence.k_start * at.n;
    }
    // The factor of key j, which this lane has looked up.
    __device__ const float* of(const KeyRows& rows, int j) const {
        return first + rows.found_page * page_step + (PAGED ? rows.found_row : j) * row_step;
    }
};
struct Descales {
    Descale k, v;

    __device__ Descales(const Params& p, const Sequence& sequence, i64 kv)
        : k(p.k_descale, p.k_descale_at, p.k_descale_rows, sequence, kv),
          v(p.v_descale, p.v_descale_at, p.v_descale_rows, sequence, kv) {}
};

// The factors of a tile in shared memory.
struct TileScales {
    static constexpr int BYTES = QUANTISED ? 2 * BLOCK_K * int(sizeof(float)) : 0;
    float *keys, *values;

    __device__ explicit TileScales(char* base)
        : keys(reinterpret_cast<float*>(base)), values(keys + BLOCK_K) {}

    // Start to copy the factor of key j, which this lane has looked up. There is no key from `end` on.
    __device__ void load(const Descales& from, const KeyRows& rows, int row, int j, int end) const {
        if (row >= BLOCK_K) return;
        const int valid = j < end ? int(sizeof(float)) : 0;
        auto copy = [&](float* to, const Descale& of) {
            const char* const source = reinterpret_cast<const char*>(of.of(rows, min(j, end - 1)));
            copy_async<sizeof(float)>(shared_address(to + row), source, valid);
        };
        copy(keys, from.k), copy(values, from.v);
    }
};

// Multiply columns by the factors of a tile, and rows by row(m, half).
template <int MT, int NT, class Row>
__device__ inline void scale_columns(Fragment<Accum, MT, NT>& x, const float* columns, Row row) {
    const Lane lane;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const float2 two = *reinterpret_cast<const float2*>(columns + 8 * n + lane.column(0));
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                x.x[m][n][e] *= Accum(e % 2 ? two.y : two.x) * row(m, e / 2);
    }
}

// The largest power of two that is not above x, from 2**-126 to 2**126: so its inverse is a normal number.
__device__ inline float power_of_two_below(float x) {
    return __uint_as_float(min(max(__float_as_uint(x) & 0x7f800000, 0x00800000u), 0x7e800000u));
}
__device__ inline float inverse_of_power(float power) {
    return __uint_as_float(0x7f000000 - __float_as_uint(power));
}

// P is multiplied by the factor of the value over a unit, which leaves P the range of float16: the largest
// power of two that is not above the largest factor so far.
struct ValueUnit {
    float unit = power_of_two_below(0);

    // Raise the unit to the factors of a tile. Returns the factor for the sums of earlier tiles. All lanes
    // of a warp call.
    __device__ Accum raise(const float* factors) {
        float own = 0, before = unit;
        for (int n = threadIdx.x % WARP % BLOCK_K; n < BLOCK_K; n += WARP) own = fmaxf(own, fabsf(factors[n]));
        unit = fmaxf(unit, power_of_two_below(warp_maximum(own)));
        return before * inverse();
    }
    __device__ Accum inverse() const { return inverse_of_power(unit); }
};

// Load rows of q as float16 operands: each row times a power of two, in the order of multiply_keys. Scores
// of row r must be multiplied by factors[r]. row(r) is the address of a row.
template <class Tile, class Row>
__device__ inline void load_queries(const Tile& tile, float* factors, int rows, int columns, Row row) {
    constexpr int OWN = HEAD_DIM / WARP;  // columns of a lane
    const int lane = threadIdx.x % WARP;
#pragma unroll 1
    for (int r = threadIdx.x / WARP; r < BLOCK_Q; r += THREADS / WARP) {
        const Element* const from = row(r);
        float x[OWN], most = 0;
#pragma unroll
        for (int n = 0; n < OWN; ++n) {
            const int d = n * WARP + lane;
            x[n] = r < rows && d < columns ? float(widen(from[d])) : 0;
            most = fmaxf(most, fabsf(x[n]));
        }
        most = warp_maximum(most);
        // float16 rows stay as they are. Others may reach 2**15.
        const bool fits = HAS_FINITE_SUMS<Element> || most == 0 || !is_finite(most);
        const float scale = fits ? 1 : power_of_two_below(0x1p14f * inverse_of_power(power_of_two_below(most)));
#pragma unroll
        for (int n = 0; n < OWN; ++n)
            tile.element(tile.at(r, query_column(n * WARP + lane))) = narrow<Operand>(x[n] * scale);
        if (lane == 0) factors[r] = inverse_of_power(scale);
    }
}
