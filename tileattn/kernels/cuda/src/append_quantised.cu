// Append new keys and values to a cache of 8 bits, and apply RoPE to the keys. A warp takes a row: the keys,
// or the values, of a token and a head. As quantise.py.
#include "new_tokens.cuh"

constexpr float LARGEST = LARGEST_8_BIT<KvElement>;

// The elements of a new row, rotated if they are keys, in the dtype of the new rows.
struct NewRow {
    const TokenParams& p;
    const Element* from;
    i64 step, pairs, table_row;

    __device__ NewRow(const TokenParams& p, const RowArray& rows, const void* data, const Token& token,
                      i64 h)
        : p(p),
          from(static_cast<const Element*>(data) + token.from_b * rows.from.b + h * rows.from.h +
               token.from_n * rows.from.n),
          step(rows.from.d),
          pairs(rows.pairs),
          table_row(min(max(token.position, i64(0)), p.table_rows - 1)) {}

    __device__ float at(i64 column) const {
        const float x = widen(from[column * step]);
        if (column >= 2 * pairs) return x;
        const i64 pair = p.interleaved ? column / 2 : column % pairs;
        const bool second = p.interleaved ? column % 2 : column >= pairs;
        const i64 apart = p.interleaved ? 1 : pairs;
        const float other = widen(from[(second ? column - apart : column + apart) * step]);
        float a = second ? other : x, b = second ? x : other;
        rotate(a, b, entry(p.cos, p.cos_at, pair), entry(p.sin, p.sin_at, pair));
        return widen(narrow<Element>(second ? b : a));
    }
    __device__ float entry(const void* table, const Table& at, i64 pair) const {
        const i64 place = table_row * at.n + pair * at.c;
        switch (at.bytes) {
            case 0: return widen(static_cast<const bfloat16*>(table)[place]);
            case 2: return widen(static_cast<const float16*>(table)[place]);
            case 4: return static_cast<const float*>(table)[place];
            default: return float(static_cast<const double*>(table)[place]);
        }
    }
};

// The factor at which the largest element is the largest number.
__device__ inline float fitting_factor(const NewRow& row, i64 columns) {
    float most = 0;
    bool nan = false;
    for (i64 d = threadIdx.x % WARP; d < columns; d += WARP) {
        const float size = fabsf(row.at(d));
        nan = nan || size != size;
        most = fmaxf(most, size);
    }
    most = warp_maximum(most);
    nan = __any_sync(~0u, nan && LARGEST == LARGEST_8_BIT<int8>);  // float8_e4m3fn stores NaN
    return nan || !is_finite(most) ? __uint_as_float(0x7fc00000) : most / LARGEST;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    append_quantised(const __grid_constant__ TokenParams p) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool of_keys = blockIdx.z == 0;
    const RowArray& rows = of_keys ? p.k_rows : p.v_rows;
    const Factors& at = of_keys ? p.k_descale_at : p.v_descale_at;
    float* const factors = of_keys ? p.k_descale : p.v_descale;
    KvElement* const cache = static_cast<KvElement*>(of_keys ? p.k_cache : p.v_cache);
    write_lengths(p);
    Token token;
    const i64 t = blockIdx.x * i64(THREADS / WARP) + warp;
    if (t >= p.tokens || !find_token(p, t, token)) return;
    for (i64 h = blockIdx.y; h < p.heads; h += gridDim.y) {
        const NewRow row(p, rows, of_keys ? p.k : p.v, token, h);
        float* const place = factors + h * at.h +
                             (at.by_row ? token.to_b * at.b + token.to_n * at.n : token.sequence * at.b);
        const float factor = at.by_row ? fitting_factor(row, rows.columns) : *place;
        if (at.by_row && lane == 0) *place = factor;
        KvElement* const to = cache + token.to_b * rows.to.b + h * rows.to.h + token.to_n * rows.to.n;
        for (i64 d = lane; d < rows.columns; d += WARP) {
            const float x = row.at(d);
            to[d * rows.to.d] = narrow<KvElement>(factor == 0 && is_finite(x) ? 0 : x / factor);
        }
    }
}
