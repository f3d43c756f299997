// Split the rows of float32 keys and values. In the forward pass, also clear the flags of heads.
#include "head_flags.cuh"
#include "split_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    split_keys(const __grid_constant__ Params p) {
    overlap_launches();
    const bool is_forward = !p.dout;
    if (is_forward && blockIdx.x == 0)
        for (int i = threadIdx.x; i < 2 + p.entries * p.Hq; i += THREADS) p.head_flags[i] = 0;
    const SplitWork work;
    const int blocks = block_count<TILE_ROWS>(p, p.Nk);
    const HeadBlock<TILE_ROWS> at(p, p.key_ends(), int(p.Hkv), work.index / blocks, work.index % blocks);
    const Sequence sequence(p, at.b);
    const i64 entry = sequence.entry(), start = sequence.k_start;
    // The forward pass reads no tile past the length: a cache may have a far larger capacity.
    if (at.block * TILE_ROWS >= (is_forward ? sequence.length(p) : sequence.Nk)) return;
    const i64 factors = first_factor(p, p.Hkv, p.Nk, entry, at.h, start, at.b);
    const SplitArray x = work.second ? SplitArray{p.v, p.v_at, int(p.Dv), plane_columns(VALUE_DIM), p.v_planes,
                                                  p.v_factors + factors}
                                     : SplitArray{p.k, p.k_at, int(p.D), plane_columns(HEAD_DIM), p.k_planes,
                                                  p.k_factors + factors};
    work.split(x, entry, at.h, p.Hkv, p.Nk, start, at.block, int(sequence.Nk), int(sequence.length(p)));
}
