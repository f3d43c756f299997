// Apply RoPE to the rows of an array, and store them to another one. A CTA takes some rows and heads.
#include "token_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    rope(const __grid_constant__ TokenParams p) {
    auto find = [&](i64 t, Token& token) {
        const i64 b = t / p.N, n = t % p.N;
        // `positions` has a position for each row; `position` is the first row's.
        const i64 position = p.positions ? p.positions_at.of(p.positions, b, n) : p.position + n;
        token = {b, n, b, n, position};
        return true;
    };
    write_rows(p, p.k_rows, p.k, p.k_cache, find);
}
