// Layer 3. The score tiles whose dS a CTA sums, in a fixed order, and each warp's part of a tile.
#pragma once

#include "head.cuh"

constexpr int MT = BLOCK_Q / (16 * WARPS_M);
constexpr int NT = BLOCK_K / (8 * WARPS_N);
static_assert(NT % 2 == 0, "atoms are loaded in pairs");

// The first row and column of this warp's scores.
__device__ inline int first_row() { return threadIdx.x / WARP / WARPS_N * MT * 16; }
__device__ inline int first_column() { return threadIdx.x / WARP % WARPS_N * NT * 8; }

// The indices of one axis that a CTA sums over: all of them, or one.
struct Axis {
    bool all;
    int begin, end, at;

    __device__ Axis(bool all, i64 own, i64 size)
        : all(all), begin(all ? 0 : int(own)), end(all ? int(size) : begin + 1), at(begin) {}

    __device__ bool is_one() const { return end - begin == 1; }

    // Advance and return true, or return to the first index and return false.
    __device__ bool next() {
        if (++at < end) return true;
        at = begin;
        return false;
    }
    // Advance by n indices, and return how often that passes the last one.
    __device__ int advance(int n) {
        if (is_one()) return n;
        const int size = end - begin, to = at - begin + n, passes = to / size;
        at = begin + to - passes * size;
        return passes;
    }
};

// The score tiles that a CTA sums over, keys fastest: rows of tiles share, share + shares, share + 2 *
// shares and so on. All threads call.
struct Steps {
    const Params& p;
    Axis b, h, q, k;
    Sequence sequence;  // of b
    int shares, key_head, length, kind;
    bool done;

    __device__ Steps(const Params& p, Axis b, Axis h, Axis q, Axis k, int share = 0, int shares = 1)
        : p(p), b(b), h(h), q(q), k(k), sequence(p, b.at), shares(shares) {
        fit();
        done = !skip(share);
        --this->k.at;
        if (!done) next();
    }
    // Advance by some rows of tiles. Returns false after the last.
    __device__ bool skip(int rows) {
        if constexpr (PACKED) {  // each sequence has its own number of rows
            for (; rows; --rows)
                if (!(q.next() || h.next() || next_entry())) return false;
        } else {
            b.at += h.advance(q.advance(rows));
            if (b.at >= b.end) return false;
            sequence = Sequence(p, b.at);
        }
        return true;
    }
    __device__ bool next_entry() {
        if (!b.next()) return false;
        sequence = Sequence(p, b.at);
        fit();
        return true;
    }
    // A packed sequence has its own number of tiles; an empty one has a single empty tile.
    __device__ void fit() {
        if constexpr (PACKED) {
            if (q.all) q.end = max(1, int((sequence.Nq + BLOCK_Q - 1) / BLOCK_Q));
            if (k.all) k.end = max(1, int((sequence.Nk + BLOCK_K - 1) / BLOCK_K));
        }
    }
    __device__ int q0() const { return q.at * BLOCK_Q; }
    __device__ int k0() const { return k.at * BLOCK_K; }
    // The index of the first row of this row of tiles in delta and lse_log2.
    __device__ i64 row() const { return sequence.padded_row(p, h.at) + q0(); }
    // True if all steps have the same tile of the bias.
    __device__ bool one_bias() const {
        return q.is_one() && k.is_one() && (b.is_one() || p.bias_B == 1) &&
               (h.is_one() || p.bias_H == 1);
    }

    __device__ void next() {
        do {
            done = !(k.next() || skip(shares));
            if (done) return;
            const AttentionMask attn_mask(p, b.at, h.at);
            kind = attn_mask.kind(q0(), q0() + BLOCK_Q, k0(), k0() + BLOCK_K);
            length = attn_mask.window.length;
        } while (kind == EMPTY);
        key_head = h.at / int(p.group);
    }
};
