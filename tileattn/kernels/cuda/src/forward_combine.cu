// Combine the sums of split-KV over the splits of each row. Splits are added in order to a group, groups to a section
// of eight groups, and sections to the result. So the order of the sums depends only on the indices of the keys.
// WARPS_N warps share a row: one, or eight.
//
// The loops are rolled, to keep the code short: if other kernels ran since the last call, the instructions come from
// device memory, and this kernel waits for them.
#include "partial_sums.cuh"

constexpr int SECTION = 8;  // groups
constexpr int LANE_BYTES = COLUMNS * int(sizeof(Accum));
constexpr int AHEAD = LANE_BYTES <= 16 ? 8 : LANE_BYTES <= 64 ? 128 / LANE_BYTES : 1;  // splits that are loaded ahead
static_assert(WARPS_N == 1 || WARPS_M == 1, "__syncthreads joins the warps of a row");

// Sums over keys: the statistics of a row, and this lane's columns.
struct Sums {
    RowSum row;
    Accum columns[COLUMNS] = {};

    __device__ void add(const Sums& next, Accum softmax_scale_log2) {
        const RowSum::Factors factors = row.add(next.row, softmax_scale_log2);
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) columns[n] = factors.sum(columns[n], next.columns[n]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS_PER_SM)
    forward_combine(const __grid_constant__ Params p) {
    launch_dependents();
    pass_kernel_before();  // lengths and offsets were complete before that kernel began
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, share = warp % WARPS_N;
    const SplitRow row(p, int(blockIdx.x) * WARPS_M + warp / WARPS_N);
    wait_for_prerequisites();
    if (!row.is_there) return;
    const int together = int(p.group_keys / p.split_keys);  // splits of a group
    const bool has_groups = together > 1;
    const int span = has_groups ? together : SECTION, length = SECTION * together;
    auto add = [&](Sums& sums, const Sums& next) { sums.add(next, row.softmax_scale_log2); };
    __shared__ Accum columns[WARPS_N][WARPS_N > 1 ? VALUE_DIM : 1], statistics[WARPS_N][2];
    Sums total, section;

    // In each round a warp adds up the splits of one span. A span is a group, or a section if each group is one split.
#pragma unroll 1
    for (int first = row.begin / length * length; first < row.end; first += WARPS_N * span) {
        const int start = first + share * span;
        const int begin = max(start, row.begin), end = min(start + span, row.end);
        Part parts[AHEAD];
#pragma unroll
        for (int n = 0; n < AHEAD; ++n)
            if (begin + n < end) parts[n].load(p, row.first + begin + n, lane);
        Sums own;
#pragma unroll 1
        for (int split = begin; split < end; ++split) {
            Sums next;
            next.row = parts[0].sum;
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) next.columns[n] = parts[0].columns[n / VECTOR].values[n % VECTOR];
#pragma unroll
            for (int n = 1; n < AHEAD; ++n) parts[n - 1] = parts[n];
            if (split + AHEAD < end) parts[AHEAD - 1].load(p, row.first + split + AHEAD, lane);
            add(own, next);
        }
        if constexpr (WARPS_N > 1) {
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) columns[share][column_of(n, lane)] = own.columns[n];
            if (lane == 0) own.row.store(statistics[share]);
            __syncthreads();
        }
#pragma unroll 1
        for (int n = 0; n < WARPS_N; ++n) {
            if constexpr (WARPS_N > 1) {
                own.row = RowSum::load(statistics[n]);
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) own.columns[i] = columns[n][column_of(i, lane)];
            }
            if (has_groups)
                add(section, own);
            else
                add(total, own);
        }
        if constexpr (WARPS_N > 1) __syncthreads();  // the sums have been read
        const int next = first + WARPS_N * span;
        if (has_groups && (next % length == 0 || next >= row.end)) {
            add(total, section);
            section = Sums();
        }
    }

    // All warps of a row have its total.
    const Accum inverse = total.row.finish(p, row.lse_index, row.h, share == 0 && lane == 0);
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
        const int d = column_of(n, lane);
        if (share == 0 && d < p.Dv) row.out[d] = narrow<Element>((total.columns[n] + 0) * inverse);  // -0 becomes 0
    }
}
