// Split the rows of float32 queries and dO, for the backward pass.
#include "split_rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    split_queries(const __grid_constant__ Params p) {
    overlap_launches();
    const SplitWork work;
    const int blocks = block_count<TILE_ROWS>(p, p.Nq);
    const HeadBlock<TILE_ROWS> at(p, p.query_ends(), int(p.Hq), work.index / blocks, work.index % blocks);
    const Sequence sequence(p, at.b);
    const i64 entry = sequence.entry(), start = sequence.q_start;
    const int rows = int(sequence.Nq);
    if (at.block * TILE_ROWS >= rows) return;
    const i64 factors = first_factor(p, p.Hq, p.Nq, entry, at.h, start, at.b);
    const SplitArray x = work.second ? SplitArray{p.dout, p.dout_at, int(p.Dv), plane_columns(VALUE_DIM),
                                                  p.dout_planes, p.dout_factors + factors}
                                     : SplitArray{p.q, p.q_at, int(p.D), plane_columns(HEAD_DIM), p.q_planes,
                                                  p.q_factors + factors};
    work.split(x, entry, at.h, p.Hq, p.Nq, start, at.block, rows, rows);
}
