// Layer 3. The places of new tokens in a cache. Integer arrays on the device are not trusted: a token whose
// row is outside the cache is not written.
#pragma once

#include "token_rows.cuh"

__device__ inline i64 length_of(const TokenParams& p, i64 b) {
    return p.positions ? p.positions_at.of(p.positions, b) : p.position;
}
__device__ inline i64 start_of(const TokenParams& p, i64 b) {
    return p.cu_seqlens ? p.cu_seqlens_at.of(p.cu_seqlens, b) : b * p.N;
}

// The sequence of a packed token: the last one that starts at or before it.
__device__ inline i64 packed_sequence(const TokenParams& p, i64 t) {
    i64 low = 0, high = p.B;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (start_of(p, middle + 1) <= t)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

__device__ inline bool find_token(const TokenParams& p, i64 t, Token& token) {
    const i64 b = p.cu_seqlens ? packed_sequence(p, t) : t / p.N;
    if (b >= p.B) return false;
    const i64 i = t - start_of(p, b), j = i64(u64(length_of(p, b)) + u64(i));
    if (i < 0 || j < 0 || j >= p.capacity) return false;
    token = {p.cu_seqlens ? 0 : b, p.cu_seqlens ? t : i, b, j, j, b};
    if (p.page) {
        token.to_b = p.block_table_at.of(p.block_table, b, j / p.page);
        token.to_n = j % p.page;
        return token.to_b >= 0 && token.to_b < p.pages;
    }
    return true;
}

// Write the new lengths, by one CTA.
__device__ inline void write_lengths(const TokenParams& p) {
    if (p.new_lengths && blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0)
        for (i64 b = threadIdx.x; b < p.B; b += THREADS)
            p.new_lengths[b] = length_of(p, b) + start_of(p, b + 1) - start_of(p, b);
}
