// Layer 3. The gather warps of Hopper's forward kernel: they copy the rows of paged keys and values, if a tile may
// lie in several pages. A TMA box would lie in one page, and small boxes take longer than the GEMMs of a tile.
#pragma once

#include "fwd_smem_sm90.cuh"
#include "lockstep.cuh"

// Entry n of the block table from entry `first` on, at most the last entry of the sequence. The lower 32 bits of
// an entry are enough.
__device__ inline u32 table_entry(const Params& p, i64 first, u32 n) {
    const i64 index = first + min(n, u32(p.table_width) - 1);
    return *reinterpret_cast<const u32*>(static_cast<const char*>(p.block_table) + index * p.block_table_bytes);
}
// The host has not checked the entries of the block table. They are clamped, so that each is an existing page.
__device__ inline u32 existing_page(const Params& p, u32 entry) { return min(entry, u32(p.pages_total) - 1); }

// The rows of a tile that one gather warp copies. The warps take turns at swizzle atoms of eight rows. A lane looks
// up the pages of LOOKUPS rows, a tile ahead, and the lanes share the addresses of their rows. Eight lanes copy the
// 128 bytes of a row in a slice.
struct RowGather {
    static constexpr int ROWS = 8, SHARE = WARP / ROWS;  // atoms whose rows the lanes look up at once
    static constexpr int WARPS = GATHERED ? GATHER_WARPS : 1;
    static constexpr int ATOMS = (BLOCK_K / ROWS + WARPS - 1) / WARPS;  // of a warp, at most
    static constexpr int LOOKUPS = (ATOMS + SHARE - 1) / SHARE;

    const Params& p;
    int warp;  // of the gather warps
    int lane = threadIdx.x % WARP;
    i64 first = 0;            // of the sequence's entries in the block table
    u32 entries[3][LOOKUPS];  // of the tile of values, the tile of keys after it, and the next one

    // The first row of an atom of this warp.
    __device__ int row_of(int atom) const { return (atom * WARPS + warp) * ROWS; }
    // The key whose page this lane looks up.
    __device__ u32 own_key(int tile, int lookup) const {
        return tile * BLOCK_K + row_of(lookup * SHARE + lane / ROWS) + lane % ROWS;
    }
    __device__ void look_up(int tile) {
#pragma unroll
        for (int n = 0; n < LOOKUPS; ++n) {
            entries[0][n] = entries[1][n], entries[1][n] = entries[2][n];
            entries[2][n] = table_entry(p, first, own_key(tile, n) / u32(p.page));
        }
    }
    // Start to copy a tile of keys (`ahead` is 1) or values (0) of a key head. Columns from `columns` on become zero.
    template <class Tile>
    __device__ void copy(const Tile& to, int tile, int ahead, const void* data, const Rows& at, int kv,
                         int columns) const {
        const int byte = lane % 8 * 16, row = lane / 8;
#pragma unroll
        for (int n = 0; n < LOOKUPS; ++n) {
            const u32 page = existing_page(p, entries[ahead][n]), own_row = own_key(tile, n) % u32(p.page);
            const u64 own = reinterpret_cast<u64>(rows_of<Element>(data, at, page, kv) + own_row * at.n);
#pragma unroll 1
            for (int i = 0; i < SHARE; ++i) {
                const int first_row = row_of(n * SHARE + i);
                if (first_row >= BLOCK_K) return;
                u32 target = to.chunk(row, byte) + first_row * Tile::PITCH;
#pragma unroll
                for (int half = 0; half < ROWS; half += SHARE) {
                    const char* from = reinterpret_cast<const char*>(__shfl_sync(~0u, own, i * ROWS + half + row));
                    copy_row(to, target, from + byte, columns * int(sizeof(Element)) - byte);
                    target ^= SHARE * Tile::PITCH | SHARE * 16;  // row + SHARE, whose chunks are swapped
                }
            }
        }
    }
    // Start to copy a lane's 16 bytes in each slice of a row. The array has `left` bytes from the first of them on.
    // Only the last slices of a bucket of the head dimension may have fewer columns.
    template <class Tile>
    __device__ static void copy_row(const Tile&, u32 target, const char* from, int left) {
        constexpr int WHOLE = Tile::SLICES > 3 ? 2 : Tile::SLICES - 1;
#pragma unroll
        for (int n = 0; n < Tile::SLICES; ++n, target += Tile::SLICE, from += Tile::PITCH) {
            if (n < WHOLE)
                copy_async<16>(target, from);
            else
                copy_async<16>(target, from, min(max(left - n * Tile::PITCH, 0), 16));
        }
    }
};

// A gather warp: copy the keys and values of each request, in the order in which produce() loads them otherwise.
__device__ inline void gather(const Params& p, const Smem& smem, int warp) {
    PipelineState<STAGES> k_pipe, v_pipe;
    RowGather rows{p, warp};
    Lockstep lockstep;
    const bool leads = rows.lane == 0;
    for (u32 phase = 0;; phase ^= 1) {
        smem.mailbox_full().wait(phase);
        const KeyRequest request = smem.mailbox().request;
        if (request.kv < 0) break;
        rows.first = request.b * p.table_width;
        rows.look_up(request.begin);
#pragma unroll 1
        for (int tile = request.begin - 1; tile < request.end; ++tile) {
            rows.look_up(tile + 2);
            // A stage is empty once the GEMMs that read it are complete. It is full once the copies of all lanes
            // of all gather warps have landed; no lane waits for its own.
            if (tile + 1 < request.end) {
                smem.k_empty(k_pipe.stage).wait(k_pipe.phase ^ 1);
                rows.copy(smem.k(k_pipe.stage), tile + 1, 1, p.k, p.k_at, request.kv, int(p.D));
                smem.k_full(k_pipe.stage).arrive_after_copies();
                k_pipe.advance();
            }
            if (tile >= request.begin) {
                smem.v_empty(v_pipe.stage).wait(v_pipe.phase ^ 1);
                rows.copy(smem.v(v_pipe.stage), tile, 0, p.v, p.v_at, request.kv, int(p.Dv));
                smem.v_full(v_pipe.stage).arrive_after_copies();
                v_pipe.advance();
                if (warp == 0 && leads) lockstep.advance(p);
            }
            // All lanes have copied the request: the producer overwrites it with plain stores.
            __syncwarp();
            if (tile == request.ask_at && leads) smem.mailbox_empty().arrive();
        }
    }
    if (warp == 0 && leads) lockstep.end(p);
}
