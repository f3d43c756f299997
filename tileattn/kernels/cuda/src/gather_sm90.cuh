// Layer 3. The gather warps of Hopper's forward kernel: they copy the rows of paged keys and values, if TMA boxes that
// each lie in one page would have fewer than BOX_KEYS rows. Such boxes take longer than copies of rows.
#pragma once

#include "fwd_smem_sm90.cuh"
#include "lockstep.cuh"

// The entries of a sequence in the block table.
struct PageTable {
    const char* entries;

    __device__ PageTable(const Params& p, int b)
        : entries(static_cast<const char*>(p.block_table) + b * p.table_width * p.block_table_bytes) {}

    // The address of entry n, or of the last entry. The lower 32 bits are enough.
    __device__ const u32* entry(const Params& p, u32 n) const {
        const u32 last = u32(p.table_width) - 1, bytes = u32(p.block_table_bytes);
        return reinterpret_cast<const u32*>(entries + u64(min(n, last)) * bytes);
    }
    // The host has not checked the entries. They are clamped, so that each is an existing page.
    __device__ static u32 page(const Params& p, u32 entry) { return min(entry, u32(p.pages_total) - 1); }
};

// Copies of the rows of tiles by one gather warp. The warps take turns at swizzle atoms of eight rows. Eight lanes
// copy the 128 bytes of a row in a slice. A batch has a row for each lane, which looks up its page while the batch
// before it is being copied; the lanes then share the addresses of their rows.
struct RowGather {
    static constexpr int ROWS = 8, BATCH = WARP / ROWS;  // rows of an atom, atoms of a batch
    static constexpr int WARPS = GATHERED ? GATHER_WARPS : 1;
    static constexpr int ATOMS = (BLOCK_K / ROWS + WARPS - 1) / WARPS;  // of a tile and a warp, at most
    static constexpr int BATCHES = (ATOMS + BATCH - 1) / BATCH;         // of a tile

    const Params& p;
    int warp;  // of the gather warps
    PageTable table;
    int lane = threadIdx.x % WARP;
    u32 entry, row;  // of this lane in the next batch: the block-table entry, and the row in its page

    // The first row of an atom of this warp.
    __device__ int row_of(int atom) const { return (atom * WARPS + warp) * ROWS; }

    // Start to look up the rows of a batch. Rows past the end of the tile or the sequence have pages, too.
    __device__ void look_up(int tile, int batch) {
        const u32 key = tile * BLOCK_K + row_of(batch * BATCH + lane / ROWS) + lane % ROWS, page = u32(p.page);
        entry = *table.entry(p, key / page), row = key % page;
    }
    // Start to copy a tile of keys or values of a key head, whose first batch has been looked up, and to look up
    // the first batch of the tile of index `next`. Columns from `columns` on become zero. A stage is empty once the
    // GEMMs that read it are complete. It is full once the copies of all lanes of all gather warps have landed: no
    // lane waits for its own copies.
    template <class Tile>
    __device__ void copy(const Tile& to, const Barrier& empty, const Barrier& full, u32 phase, int tile, int next,
                         const void* data, const Rows& at, int kv, int columns) {
        const int byte = lane % 8 * 16, left = columns * int(sizeof(Element)) - byte;
        const u32 start = to.chunk(lane / 8, byte);
#pragma unroll
        for (int n = 0; n < BATCHES; ++n) {
            const Element* const head = rows_of<Element>(data, at, PageTable::page(p, entry), kv);
            const u64 own = reinterpret_cast<u64>(head + row * at.n);
            look_up(n + 1 < BATCHES ? tile : next, (n + 1) % BATCHES);
            if (n == 0) empty.wait(phase ^ 1);
#pragma unroll 2
            for (int i = 0; i < BATCH; ++i) {
                const int first = row_of(n * BATCH + i);
                if (first >= BLOCK_K) break;
                u32 target = start + first * Tile::PITCH;
#pragma unroll
                for (int half = 0; half < ROWS; half += 4) {
                    const u64 from = __shfl_sync(~0u, own, i * ROWS + half + lane / 8);
                    copy_row<Tile>(target, reinterpret_cast<const char*>(from) + byte, left);
                    target ^= 4 * Tile::PITCH | 4 * 16;  // four rows later the halves of 128 bytes are swapped
                }
            }
        }
        full.arrive_after_copies();
    }
    // Start to copy a lane's 16 bytes in each slice of a row. The array has `left` bytes from the first of them on.
    // Only the last slices of a bucket of the head dimension may have fewer columns.
    template <class Tile>
    __device__ static void copy_row(u32 target, const char* from, int left) {
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
    Lockstep lockstep;
    const bool leads = threadIdx.x % WARP == 0;
    for (u32 phase = 0;; phase ^= 1) {
        smem.mailbox_full().wait(phase);
        const KeyRequest request = smem.mailbox().request;
        const int kv = request.kv, begin = request.begin, end = request.end;
        if (kv < 0) break;
        RowGather rows{p, warp, {p, request.b}};
        rows.look_up(begin, 0);
#pragma unroll 1
        for (int tile = begin - 1; tile < end; ++tile) {
            if (tile + 1 < end) {
                const int stage = k_pipe.stage, next = tile < begin ? min(tile + 2, end - 1) : tile;
                rows.copy(smem.k(stage), smem.k_empty(stage), smem.k_full(stage), k_pipe.phase, tile + 1, next, p.k,
                          p.k_at, kv, int(p.D));
                k_pipe.advance();
            }
            if (tile >= begin) {
                const int stage = v_pipe.stage, next = min(tile + 2, end - 1);
                rows.copy(smem.v(stage), smem.v_empty(stage), smem.v_full(stage), v_pipe.phase, tile, next, p.v,
                          p.v_at, kv, int(p.Dv));
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
