// Split the block tables and lengths of a cascade: one table for the shared keys of each group, one for the other keys
// of each sequence. A thread takes an entry. As `cascade_tables` in cascading.py.
#include "integers.cuh"

// shared_pages.py has the same fields. Each has 8 bytes. If `shared_lengths` is null, all groups share
// `shared` keys. If `kv_lengths` is null, the host knows the lengths, and no lengths are written.
struct CascadeParams {
    const void *block_table, *kv_lengths, *shared_lengths;
    void *table, *shared_table;  // contiguous; elements are as wide as in block_table
    i64 *own_lengths, *whole_lengths;
    i64 shared;
    IntegerStrides block_table_at, kv_lengths_at, shared_lengths_at;
    i64 sequences, width, members, page;  // members: sequences of a group
};

__device__ inline void store_integer(void* data, i64 bytes, i64 n, i64 x) {
    if (bytes == 4)
        static_cast<int*>(data)[n] = int(x);
    else
        static_cast<i64*>(data)[n] = x;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    cascade_tables(const __grid_constant__ CascadeParams p) {
    const i64 at = blockIdx.x * i64(THREADS) + threadIdx.x, width = max(p.width, i64(1));
    const i64 b = at / width, n = at % width, g = b / p.members;
    if (b >= p.sequences) return;
    const i64 asked = p.shared_lengths ? p.shared_lengths_at.of(p.shared_lengths, g) : p.shared;
    const i64 shared_pages = min(max(asked / p.page, i64(0)), p.width);
    const bool is_first = b % p.members == 0;
    if (n < p.width) {
        // Columns past the table may name any page: they have no keys.
        const i64 column = min(n + shared_pages, p.width - 1), bytes = p.block_table_at.bytes;
        store_integer(p.table, bytes, at, p.block_table_at.of(p.block_table, b, column));
        if (is_first)
            store_integer(p.shared_table, bytes, g * width + n, p.block_table_at.of(p.block_table, b, n));
    }
    if (n > 0) return;
    if (p.kv_lengths) p.own_lengths[b] = p.kv_lengths_at.of(p.kv_lengths, b) - shared_pages * p.page;
    if (p.whole_lengths && is_first) p.whole_lengths[g] = shared_pages * p.page;
}
