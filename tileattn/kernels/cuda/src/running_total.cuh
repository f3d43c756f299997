// Layer 3. Hopper's forward kernel with INVARIANT: it adds up the sums over a row's keys as split-KV does. A
// part is the keys of one split. The sums over a part start at zero, and are added to a total when the part
// ends. Each thread keeps its total in shared memory, as far as it fits, and the rest in the workspace.
#pragma once

#include "fwd_smem_sm90.cuh"
#include "softmax.cuh"

static_assert(!TOTALS || GROUPS == 1, "threads are counted in a CTA");

// Limit a work tile to the keys of one part: its first, or the next one after a total.
template <class Work>
__device__ inline void cut_to_part(const Params& p, Work& work, bool has_total) {
    work.has_total = has_total, work.continues = false;
    if (work.tiles.begin == work.tiles.end) return;
    const KeyTileList list(p, work);
    const int tiles = block_count<BLOCK_K>(p, p.Nk), part_tiles = int(p.split_keys) / BLOCK_K;
    const int next = (list.tile(work.tiles.begin) / part_tiles + 1) * part_tiles;
    const int end = list.lower_bound(min(next, tiles), tiles);
    work.continues = end < work.tiles.end;
    if (work.continues) work.end = work.tiles.end = end, work.tiles.ends_in_half = false;
}

// The total of the rows of a thread, in pieces: its sums, and then its output.
struct RunningTotal {
    static constexpr int VT = VALUE_DIM / 8, IN_SHARED = OUT_BLOCKS * BLOCK_PIECES;
    static constexpr u32 IN_WORKSPACE = IN_SHARED < TOTAL_PIECES ? TOTAL_PIECES - IN_SHARED : 0;
    const Params& p;
    const Smem& smem;

    __device__ float4& piece(int n) const {
        if (n >= IN_SHARED) {
            const u32 place = blockIdx.x * IN_WORKSPACE * CONSUMER_THREADS + threadIdx.x;
            return static_cast<float4*>(p.partial_out)[place + (n - IN_SHARED) * CONSUMER_THREADS];
        }
        const u32 place = threadIdx.x / WARP * STAGING_BYTES + threadIdx.x % WARP * 16;
        const int offset = n / BLOCK_PIECES * TOTAL_BLOCK + n % BLOCK_PIECES * WARP * 16;
        return *reinterpret_cast<float4*>(smem.out() + place + offset);
    }
    __device__ float4& sums() const { return piece(0); }
    __device__ float4& out(int n) const { return piece(1 + n); }

    // Add the total over earlier keys to the sums over a part, whose `state` has the sums of whole rows. If
    // keys follow, store the new total. Otherwise the memory may become staging memory, after a __syncwarp.
    __device__ void add_to(const WorkTile& work, Accum softmax_scale_log2, RowState<1>& state,
                           Fragment<Accum, 1, VT>& acc) const {
        float4 old{};
        if (work.has_total) old = sums();
        const Accum stored[2][2] = {{old.x, old.y}, {old.z, old.w}};
        Accum totals[2][2];
        RowSum::Factors factors[2];
        const u32 large = state.max_first;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            RowSum total, part;
            if (work.has_total) total = RowSum::load(stored[half]);
            part.m = state.m[0][half], part.l = state.l[0][half], part.max_first = large >> half & 1;
            factors[half] = total.add(part, softmax_scale_log2);
            total.store(totals[half]);
            state.m[0][half] = total.m, state.l[0][half] = total.l;
            state.max_first = (state.max_first & ~(1u << half)) | u32(total.max_first) << half;
        }
        __syncwarp();  // the warp has read the output of its last work tile, which was staged in this memory
#pragma unroll
        for (int n = 0; n < VT; ++n) {
            float4 before{};
            if (work.has_total) before = out(n);
            Accum(&x)[4] = acc.x[0][n];
            x[0] = factors[0].sum(before.x, x[0]), x[1] = factors[0].sum(before.y, x[1]);
            x[2] = factors[1].sum(before.z, x[2]), x[3] = factors[1].sum(before.w, x[3]);
            if (work.continues) out(n) = {x[0], x[1], x[2], x[3]};
        }
        if (work.continues) sums() = {totals[0][0], totals[0][1], totals[1][0], totals[1][1]};
    }
};
