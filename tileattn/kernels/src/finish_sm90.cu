// After Hopper's own backward kernels: dq in its own type and times the scale. A block of threads
// takes a tile of queries, and a thread 16 columns of some.
#include "rows.cuh"

static_assert(PIECE == 8, "rows and their columns begin at 16 bytes");

constexpr int COLUMNS = 16, PIECE_UNITS = DQ_PIECE / COLUMNS, ROW_UNITS = HEAD_DIM / COLUMNS;
constexpr int UNITS = BLOCK_Q * ROW_UNITS;
constexpr int TOGETHER = 2;  // units that are read before one is written
static_assert(UNITS % (TOGETHER * THREADS) == 0, "all threads have as much to do");

// What lies together of a query's sums: four times two columns of one atom and two of the next.
struct alignas(16) Sums {
    float x[4];
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENTS)
    finish_sm90(const __grid_constant__ Params p) {
    // The last tiles first: the cache may still have them.
    const int number = int(gridDim.x - 1 - blockIdx.x), tiles = (int(p.Nq) + BLOCK_Q - 1) / BLOCK_Q;
    const int head = number / tiles, q0 = number % tiles * BLOCK_Q, rows = int(p.Nq) - q0;
    const int b = head / int(p.Hq), h = head % int(p.Hq), count = min(BLOCK_Q, rows);
    const bool begun = p.landed[number * ADDERS];  // else nobody sees them
    const Sums* const tile = reinterpret_cast<const Sums*>(static_cast<const float*>(p.dq_sum) +
                                                           (head * p.Nq + q0) * HEAD_DIM);
    Element* const dq = rows_of<Element>(p.dq, p.dq_at, b, h) + q0 * p.dq_at.n;
    bool good = true;
#pragma unroll 1
    for (int first = threadIdx.x; first < UNITS; first += TOGETHER * THREADS) {
        Sums found[TOGETHER][4] = {};
        int row[TOGETHER], column[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
            const int unit = first + n * THREADS, piece = unit % ROW_UNITS / PIECE_UNITS;
            row[n] = unit / ROW_UNITS;
            const int part = row[n] / DQ_ROWS * DQ_ROWS, above = row[n] % DQ_ROWS;
            column[n] = stored_column(above, unit % ROW_UNITS * COLUMNS);
            const int place = part * ROW_UNITS +
                              (piece * min(DQ_ROWS, count - part) + above) * PIECE_UNITS +
                              unit % PIECE_UNITS;
            if (begun && row[n] < count)
#pragma unroll
                for (int t = 0; t < 4; ++t) found[n][t] = tile[4 * place + t];
        }
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n)
#pragma unroll
            for (int atom = 0; atom < 2; ++atom) {
                Piece<Element> piece;
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const float x = found[n][e / 2].x[2 * atom + e % 2] * float(p.scale);
                    good = good && is_finite(x);
                    piece.values[e] = narrow<Element>(x);
                }
                const int to = column[n] + 8 * atom;
                if (row[n] < count && to < p.D) write_whole(dq + row[n] * p.dq_at.n + to, piece);
            }
    }
    u32& known = special(p, b, h / int(p.group));
    if (!good && !(known & KNOWN)) known |= FAILED;
}
