// Layer 3. The gradient of the elements of an array that one place of the caller's score_mod reads.
// A CTA sums into a copy of the array that no other CTA adds to at the same elements, so all sums
// have a fixed order. LearnedElement and LearnedRange are in the text of the functions.
#pragma once

#include "sequence.cuh"

// The elements that the pairs of a tile reach: a range of indices along each axis.
struct ElementBox {
    static constexpr int AXES = LearnedElement::AXES > 0 ? LearnedElement::AXES : 1;
    int begin[AXES], count[AXES];
    int volume = 0;  // none yet

    __device__ ElementBox() {}
    // Of an array whose sizes follow one other.
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

    // The number within the box of an element, by indices that may lie beyond the array.
    __device__ int number(const i64* index, const i64* sizes) const {
        int n = 0;
#pragma unroll
        for (int axis = 0; axis < LearnedElement::AXES; ++axis) {
            const i64 near = AuxArray<1>::nearest(index[axis], sizes[axis + 1] - 1);
            n = n * count[axis] + int(near) - begin[axis];
        }
        return n;
    }

    // Bytes from the first element of the array to that of a number.
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

// Each thread has sums of its own for a window of the numbers in a box. All threads of a CTA call.
template <int WINDOW>
struct ElementSums {
    static constexpr int BYTES = WINDOW * THREADS * int(sizeof(Accum));

    const Params& p;
    const LearnedSums& all;
    char* const copy;     // float64: what the CTA sums into
    Accum* const window;  // of one number those of all threads are neighbours
    ElementBox box;
    i64 rows = -1;  // number of the row of tiles that was added to
    int only;       // number of the element that the first pair of the tile reads

    __device__ ElementSums(const Params& p, int share, void* memory)
        : p(p),
          all(LearnedElement::sums(p)),
          copy(const_cast<char*>(all.data) + share * all.strides[0]),
          window(static_cast<Accum*>(memory)) {
        for (int n = 0; n < WINDOW; ++n) window[n * THREADS + threadIdx.x] = 0;
    }

    // Go to a tile; whether all its pairs read one element.
    __device__ bool begin_tile(i64 b, i64 h, int q0, int k0) {
        const Sequence sequence(p, b);
        const int Nq = int(sequence.Nq), Nk = int(sequence.Nk);
        const i64 row = (b * p.Hq + h) * p.Nq + q0;
        if (row != rows) finish();  // sums in float32 stay short
        rows = row;
        const Interval<int> queries(double(q0), double(min(q0 + BLOCK_Q, Nq) - 1));
        const Interval<int> keys(double(k0), double(min(k0 + BLOCK_K, Nk) - 1));
        Interval<double> ranges[ElementBox::AXES];
        LearnedRange(p, b, h).place(queries, keys, ranges);
        const ElementBox next(ranges, all.sizes);
        // A box of one window is kept while tiles lie in it.
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
            int last = -1;  // neighbouring pairs often read one element
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

    // Add to a number of the window, if it is in that.
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

    // Add what is left in the window of a box that has but one.
    __device__ void finish() {
        if (box.volume > 0 && box.volume <= WINDOW) flush(0);
        box.volume = 0;
    }
};
