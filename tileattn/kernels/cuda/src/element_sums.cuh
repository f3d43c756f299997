// Layer 3. Sums of the gradient of an array that score_mod reads, for one place where it reads it. No other
// CTA adds to the same elements of the same copy, so all sums have a fixed order. LearnedElement and
// LearnedRange are in the generated functions.cuh.
#pragma once

#include "sequence.cuh"

// The elements that the pairs of a tile read: a range of indices along each axis.
struct ElementBox {
    static constexpr int AXES = LearnedElement::AXES > 0 ? LearnedElement::AXES : 1;
    int begin[AXES], count[AXES];
    int volume = 0;  // number of elements; 0: no box yet

    __device__ ElementBox() {}
    // From bounds of the indices. sizes[0] is the number of copies; the sizes of the array follow.
    __device__ ElementBox(const Interval<double>* ranges, const i64* sizes) : volume(1) {
        begin[0] = 0, count[0] = 1;
#pragma unroll
        for (int axis = 0; axis < LearnedElement::AXES; ++axis) {
            const double last = double(sizes[axis + 1] - 1);
            const Interval<double> range = ranges[axis];
            const double lo = range.is_known() ? fmax(fmin(range.low, last), 0.0) : 0.0;
            const double hi = range.is_known() ? fmax(fmin(range.high, last), 0.0) : last;
            begin[axis] = int(lo), count[axis] = int(hi) - int(lo) + 1;
            volume *= count[axis];
        }
    }

    __device__ bool contains(const ElementBox& other) const {
        bool inside = volume > 0;
#pragma unroll
        for (int axis = 0; axis < AXES; ++axis)
            inside = inside && begin[axis] <= other.begin[axis] &&
                     other.begin[axis] + other.count[axis] <= begin[axis] + count[axis];
        return inside;
    }

    // The number of an element in the box. Indices past the end of the array are clamped.
    __device__ int number(const i64* index, const i64* sizes) const {
        int n = 0;
#pragma unroll
        for (int axis = 0; axis < LearnedElement::AXES; ++axis) {
            const i64 near = AuxArray<1>::nearest(index[axis], sizes[axis + 1] - 1);
            n = n * count[axis] + int(near) - begin[axis];
        }
        return n;
    }

    // The offset in bytes of element number n of the box.
    __device__ i64 offset(int n, const i64* strides) const {
        i64 bytes = 0;
#pragma unroll
        for (int axis = LearnedElement::AXES - 1; axis >= 0; --axis) {
            bytes += (begin[axis] + n % count[axis]) * strides[axis + 1];
            n /= count[axis];
        }
        return bytes;
    }
};

// Sums over the pairs of tiles. Each thread has its own sums for a window of WINDOW elements of the box.
// All threads of a CTA call.
template <int WINDOW>
struct ElementSums {
    static constexpr int BYTES = WINDOW * THREADS * int(sizeof(Accum));

    const Params& p;
    const LearnedSums& all;
    char* const copy;     // float64: the copy of this CTA
    Accum* const window;  // the sums of all threads for one element are neighbours
    ElementBox box;
    i64 rows = -1;  // the row of tiles of the last tile
    int only;       // number of the element that the first pair of the tile reads

    __device__ ElementSums(const Params& p, int share, void* memory)
        : p(p),
          all(LearnedElement::sums(p)),
          copy(const_cast<char*>(all.data) + share * all.strides[0]),
          window(static_cast<Accum*>(memory)) {
        for (int n = 0; n < WINDOW; ++n) window[n * THREADS + threadIdx.x] = 0;
    }

    // Go to a tile. Returns true if all its pairs read the same element.
    __device__ bool begin_tile(i64 b, i64 h, int q0, int k0) {
        const Sequence sequence(p, b);
        const int Nq = int(sequence.Nq), Nk = int(sequence.Nk);
        const i64 row = (b * p.Hq + h) * p.Nq + q0;
        if (row != rows) finish();  // a float32 sum covers at most one row of tiles
        rows = row;
        const Interval<int> queries(double(q0), double(min(q0 + BLOCK_Q, Nq) - 1));
        const Interval<int> keys(double(k0), double(min(k0 + BLOCK_K, Nk) - 1));
        Interval<double> ranges[ElementBox::AXES];
        LearnedRange(p, b, h).place(queries, keys, ranges);
        const ElementBox next(ranges, all.sizes);
        // A box that fits one window is kept as long as it contains the tiles' boxes.
        if (box.volume > WINDOW || !box.contains(next)) finish(), box = next;
        i64 index[ElementBox::AXES];
#pragma unroll
        for (int axis = 0; axis < ElementBox::AXES; ++axis) index[axis] = next.begin[axis];
        only = box.number(index, all.sizes);
        return next.volume == 1;
    }

    // Add dS of the tile: for_each(visit) calls visit(x, i, j) for each pair of this thread.
    template <class ForEach>
    __device__ void add_to_one(ForEach for_each) {
        Accum total = 0;
        for_each([&](Accum x, int, int) { total += x; });
        add(only, total);
    }
    template <class ForEach>
    __device__ void add_to_each(i64 b, i64 h, ForEach for_each) {
        const LearnedElement element(p, b, h);
        i64 index[ElementBox::AXES];
        for (int first = 0; first < box.volume; first += WINDOW) {
            int last = -1;  // neighbouring pairs often read the same element
            Accum run = 0;
            for_each([&](Accum x, int i, int j) {
                if (x == 0) return;
                element.place(min(i, int(p.Nq) - 1), min(j, int(p.Nk) - 1), index);
                const int n = box.number(index, all.sizes);
                if (n != last) add(last - first, run), last = n, run = 0;
                run += x;
            });
            add(last - first, run);
            if (box.volume > WINDOW) flush(first);
        }
    }

    // Add to element n of the window, if it is inside.
    __device__ void add(int n, Accum x) {
        if (u32(n) < u32(WINDOW)) window[n * THREADS + threadIdx.x] += x;
    }

    // Add a window to the copy, and clear it.
    __device__ void flush(int first) {
        sync_threads();  // all threads have added to the window
        const int count = min(WINDOW, box.volume - first), lane = threadIdx.x % WARP;
        for (int base = int(threadIdx.x) - lane; base < count; base += THREADS) {
            Accum own = 0;
            for (int k = 0; k < WARP && base + k < count; ++k) {
                Accum total = 0;
                for (int t = lane; t < THREADS; t += WARP) {
                    Accum& x = window[(base + k) * THREADS + t];
                    total += x, x = 0;
                }
#pragma unroll
                for (int step = WARP / 2; step; step /= 2)
                    total += __shfl_xor_sync(~0u, total, step);
                if (lane == k) own = total;
            }
            if (base + lane < count)
                *reinterpret_cast<double*>(copy + box.offset(first + base + lane, all.strides)) +=
                    double(own);
        }
        sync_threads();  // the window is clear
    }

    // Add the rest of the window to the copy. A box of several windows has been flushed.
    __device__ void finish() {
        if (box.volume > 0 && box.volume <= WINDOW) flush(0);
        box.volume = 0;
    }
};
