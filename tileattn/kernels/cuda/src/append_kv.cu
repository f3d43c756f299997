// Append new keys and values to a cache, and apply RoPE to the keys. A CTA takes some tokens and heads, of
// keys or of values.
#include "new_tokens.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    append_kv(const __grid_constant__ TokenParams p) {
    const bool of_keys = blockIdx.z == 0;
    write_rows(p, of_keys ? p.k_rows : p.v_rows, of_keys ? p.k : p.v,
               of_keys ? p.k_cache : p.v_cache,
               [&](i64 t, Token& token) { return find_token(p, t, token); });
    write_lengths(p);
}
