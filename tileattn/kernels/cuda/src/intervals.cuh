// Layer 3. Interval arithmetic: bounds of a mask_mod over ranges of indices. The functions have the names
// of those in numpy.cuh, and the rules of intervals.py.
#pragma once

#include "numpy.cuh"

constexpr double EXACT = 9007199254740992.0;  // 2**53: float64 represents every smaller integer
constexpr int MAX_ELEMENTS = 1 << 14;         // elements of an array that are read for one tile, at most

template <class T>
constexpr bool IS_BOOLEAN = false;
template <>
constexpr bool IS_BOOLEAN<bool> = true;
template <class T>
constexpr bool IS_FLOATING = false;
template <>
constexpr bool IS_FLOATING<float> = true;
template <>
constexpr bool IS_FLOATING<double> = true;

// Relative slack of bounds that are computed in float64 for a float32 value: its rounding, and the errors
// of the C library.
template <class T>
constexpr double SLACK = 0;
template <>
constexpr double SLACK<float> = 0x1p-19;

// The smallest and largest value of type T; both are NaN if nothing is known. Booleans are 0 and 1.
template <class T>
struct Interval {
    double low, high;

    __device__ Interval() {}
    __device__ Interval(double value) : Interval(value, value) {}
    __device__ Interval(double least, double most) : low(least), high(most) {
        if constexpr (IS_BOOLEAN<T>) {
            low = least == least ? least : 0, high = most == most ? most : 1;
        } else {
            const double bound = IS_FLOATING<T> ? infinity<double>() : EXACT;
            low -= SLACK<T> * fabs(least), high += SLACK<T> * fabs(most);
            if (!(fabs(least) < bound && fabs(most) < bound)) low = high = numpy::nan<double>();
        }
    }
    template <class Other>
    __device__ Interval(Interval<Other> x) : Interval(x.low, x.high) {}

    __device__ static Interval unknown() { return numpy::nan<double>(); }
    __device__ bool is_known() const { return low == low; }
    __device__ bool is_one_value() const { return low == high; }
};

template <class T>
__device__ inline Interval<T> widen(Interval<T> x) {
    return x;
}

namespace numpy {

// --- helpers ------------------------------------------------------------------------------------

// A function that is monotone in each of its inputs has its extremes at the ends.
template <class T, class Function>
__device__ inline Interval<T> at_ends(Function f, Interval<T> x) {
    const double first = f(x.low), last = f(x.high);
    return {minimum(first, last), maximum(first, last)};
}
template <class T, class Function>
__device__ inline Interval<T> at_corners(Function f, Interval<T> x, Interval<T> y) {
    const double a = f(x.low, y.low), b = f(x.low, y.high);
    const double c = f(x.high, y.low), d = f(x.high, y.high);
    return {minimum(minimum(a, b), minimum(c, d)), maximum(maximum(a, b), maximum(c, d))};
}

// The C library's functions are monotone up to a few units in the last place.
template <class T>
__device__ inline Interval<T> nearly(Interval<T> x) {
    const double slack = 0x1p-49 * fmax(fabs(x.low), fabs(x.high));
    return {x.low - slack, x.high + slack};
}

__device__ inline Interval<bool> logic(bool is_true, bool is_false) {
    return {is_true ? 1.0 : 0.0, is_false ? 0.0 : 1.0};
}

// --- arithmetic ---------------------------------------------------------------------------------

template <class T>
__device__ inline Interval<T> add(Interval<T> x, Interval<T> y) {
    return {add(x.low, y.low), add(x.high, y.high)};
}
template <class T>
__device__ inline Interval<T> subtract(Interval<T> x, Interval<T> y) {
    return {subtract(x.low, y.high), subtract(x.high, y.low)};
}
template <class T>
__device__ inline Interval<T> multiply(Interval<T> x, Interval<T> y) {
    return at_corners([](double a, double b) { return multiply(a, b); }, x, y);
}
template <class T>
__device__ inline Interval<T> divide(Interval<T> x, Interval<T> y) {
    if (y.low <= 0 && y.high >= 0) return Interval<T>::unknown();
    return at_corners([](double a, double b) { return a / b; }, x, y);
}
template <class T>
__device__ inline Interval<T> negative(Interval<T> x) {
    return {-x.high, -x.low};
}
template <class T>
__device__ inline Interval<T> absolute(Interval<T> x) {
    const double first = fabs(x.low), last = fabs(x.high);
    return {x.low <= 0 && x.high >= 0 ? 0.0 : minimum(first, last), maximum(first, last)};
}
template <class T>
__device__ inline Interval<T> sign(Interval<T> x) {
    return {sign(x.low), sign(x.high)};
}

template <class T>
__device__ inline Interval<T> floor_divide(Interval<T> x, Interval<T> y) {
    if (!x.is_known() || !y.is_known() || (y.low <= 0 && y.high >= 0))
        return Interval<T>::unknown();
    return at_corners([](double a, double b) { return double(floor_divide(i64(a), i64(b))); }, x, y);
}
template <class T>
__device__ inline Interval<T> remainder(Interval<T> x, Interval<T> y) {
    if (!x.is_known() || !(y.low > 0)) return Interval<T>::unknown();
    const double first = remainder(x.low, y.low), last = remainder(x.high, y.low);
    // Between two multiples of the divisor the remainder grows with the dividend.
    if (y.is_one_value() && x.high - x.low < y.low && first <= last) return {first, last};
    // Integers stay below the divisor. Floats may reach it, when the remainder of a small negative one is
    // rounded.
    return {0.0, IS_FLOATING<T> ? y.high : y.high - 1};
}

template <class T>
__device__ inline Interval<T> minimum(Interval<T> x, Interval<T> y) {
    return {minimum(x.low, y.low), minimum(x.high, y.high)};
}
template <class T>
__device__ inline Interval<T> maximum(Interval<T> x, Interval<T> y) {
    return {maximum(x.low, y.low), maximum(x.high, y.high)};
}

// --- functions of floats ------------------------------------------------------------------------

template <class T>
__device__ inline Interval<T> power(Interval<T> x, Interval<T> y) {
    if (!(x.low > 0)) return Interval<T>::unknown();
    return nearly(at_corners([](double a, double b) { return power(a, b); }, x, y));
}
template <class T>
__device__ inline Interval<T> exp(Interval<T> x) {
    return nearly(at_ends([](double a) { return exp(a); }, x));
}
template <class T>
__device__ inline Interval<T> log(Interval<T> x) {
    return nearly(at_ends([](double a) { return log(a); }, x));
}
template <class T>
__device__ inline Interval<T> log2(Interval<T> x) {
    return nearly(at_ends([](double a) { return log2(a); }, x));
}
template <class T>
__device__ inline Interval<T> tanh(Interval<T> x) {
    return nearly(at_ends([](double a) { return tanh(a); }, x));
}
template <class T>
__device__ inline Interval<T> expm1(Interval<T> x) {
    return nearly(at_ends([](double a) { return expm1(a); }, x));
}
template <class T>
__device__ inline Interval<T> log1p(Interval<T> x) {
    return nearly(at_ends([](double a) { return log1p(a); }, x));
}
template <class T>
__device__ inline Interval<T> arctan(Interval<T> x) {
    return nearly(at_ends([](double a) { return arctan(a); }, x));
}
template <class T>
__device__ inline Interval<T> erf(Interval<T> x) {
    return nearly(at_ends([](double a) { return erf(a); }, x));
}
template <class T>
__device__ inline Interval<T> sigmoid(Interval<T> x) {
    return nearly(at_ends([](double a) { return sigmoid(a); }, x));
}
template <class T>
__device__ inline Interval<T> sin(Interval<T> x) {
    return {x.low * 0 - 1, x.high * 0 + 1};
}
template <class T>
__device__ inline Interval<T> cos(Interval<T> x) {
    return sin(x);
}
template <class T>
__device__ inline Interval<T> sqrt(Interval<T> x) {
    return {sqrt(x.low), sqrt(x.high)};
}
template <class T>
__device__ inline Interval<T> floor(Interval<T> x) {
    return {floor(x.low), floor(x.high)};
}
template <class T>
__device__ inline Interval<T> ceil(Interval<T> x) {
    return {ceil(x.low), ceil(x.high)};
}
template <class T>
__device__ inline Interval<T> rint(Interval<T> x) {
    return {rint(x.low), rint(x.high)};
}
template <class T>
__device__ inline Interval<i64> truncate(Interval<T> x) {
    return {::trunc(x.low), ::trunc(x.high)};
}

// --- comparisons, choice and bits ---------------------------------------------------------------

template <class T>
__device__ inline Interval<bool> less(Interval<T> x, Interval<T> y) {
    return logic(x.high < y.low, x.low >= y.high);
}
template <class T>
__device__ inline Interval<bool> less_equal(Interval<T> x, Interval<T> y) {
    return logic(x.high <= y.low, x.low > y.high);
}
template <class T>
__device__ inline Interval<bool> equal(Interval<T> x, Interval<T> y) {
    return logic(x.is_one_value() && y.is_one_value() && x.low == y.low,
                 x.high < y.low || y.high < x.low);
}
template <class T>
__device__ inline Interval<bool> not_equal(Interval<T> x, Interval<T> y) {
    const Interval<bool> same = equal(x, y);
    return {1 - same.high, 1 - same.low};
}

template <class T>
__device__ inline Interval<T> where(Interval<bool> condition, Interval<T> x, Interval<T> y) {
    if (condition.low == 1) return x;
    if (condition.high == 0) return y;
    return {minimum(x.low, y.low), maximum(x.high, y.high)};
}

// A function of bits: exact for single values. For non-negative ranges only the largest result is known.
template <class T, class Function>
__device__ inline Interval<T> of_bits(Function f, Interval<T> x, Interval<T> y, double most) {
    if (x.is_one_value() && y.is_one_value()) return double(f(i64(x.low), i64(y.low)));
    if (!(x.low >= 0 && y.low >= 0)) return Interval<T>::unknown();
    return {0.0, most};
}
__device__ inline double all_bits_below(double x) {
    int bits;
    frexp(fmax(x, 0.0), &bits);
    return ldexp(1.0, bits) - 1;
}

template <class T>
__device__ inline Interval<T> bitwise_and(Interval<T> x, Interval<T> y) {
    if constexpr (IS_BOOLEAN<T>) return minimum(x, y);
    return of_bits([](i64 a, i64 b) { return a & b; }, x, y, minimum(x.high, y.high));
}
template <class T>
__device__ inline Interval<T> bitwise_or(Interval<T> x, Interval<T> y) {
    if constexpr (IS_BOOLEAN<T>) return maximum(x, y);
    const double most = all_bits_below(maximum(x.high, y.high));
    return of_bits([](i64 a, i64 b) { return a | b; }, x, y, most);
}
template <class T>
__device__ inline Interval<T> bitwise_xor(Interval<T> x, Interval<T> y) {
    if constexpr (IS_BOOLEAN<T>) return not_equal(x, y);
    const double most = all_bits_below(maximum(x.high, y.high));
    return of_bits([](i64 a, i64 b) { return a ^ b; }, x, y, most);
}
template <class T>
__device__ inline Interval<T> invert(Interval<T> x) {
    if constexpr (IS_BOOLEAN<T>) return {1 - x.high, 1 - x.low};
    return {-x.high - 1, -x.low - 1};
}

// Known for shifts within the bits of a float64.
template <class T>
__device__ inline Interval<T> left_shift(Interval<T> x, Interval<T> y) {
    if (!(y.low >= 0 && y.high <= 52)) return Interval<T>::unknown();
    return at_corners([](double a, double b) { return ldexp(a, int(b)); }, x, y);
}
template <class T>
__device__ inline Interval<T> right_shift(Interval<T> x, Interval<T> y) {
    if (!(y.low >= 0 && y.high <= 52)) return Interval<T>::unknown();
    return at_corners([](double a, double b) { return ::floor(ldexp(a, -int(b))); }, x, y);
}

// --- arrays -------------------------------------------------------------------------------------

// Negative indices count from the end. A range on both sides of 0 may reach every element.
template <class T>
__device__ inline Interval<double> from_start(Interval<T> index, i64 size) {
    if (index.low >= 0) return index;
    if (index.high < 0) return {index.low + double(size), index.high + double(size)};
    return Interval<double>::unknown();
}

// The smallest and the largest element over ranges of indices, which the lanes of a warp divide among
// themselves. Unknown if there are too many elements.
template <class T, int AXES, class First, class... Others>
__device__ inline Interval<double> element(const AuxArray<AXES>& x, Interval<First> first,
                                           Interval<Others>... others) {
    const Interval<double> ranges[AXES] = {first, others...};
    i64 begin[AXES];
    int counts[AXES];
    double total = 1;
#pragma unroll
    for (int axis = 0; axis < AXES; ++axis) {
        const Interval<double> range = ranges[axis];
        const double last = double(x.sizes[axis] - 1);
        const double lo = range.is_known() ? fmax(fmin(range.low, last), 0.0) : 0.0;
        const double hi = range.is_known() ? fmax(fmin(range.high, last), 0.0) : last;
        begin[axis] = i64(lo), total *= hi - lo + 1;
        if (total > MAX_ELEMENTS) return Interval<double>::unknown();
        counts[axis] = int(hi - lo) + 1;
    }
    double low = infinity<double>(), high = -low;
    for (int n = int(threadIdx.x) % WARP; n < int(total); n += WARP) {
        const char* at = x.data;
        int left = n;
#pragma unroll
        for (int axis = AXES - 1; axis >= 0; --axis) {
            at += (begin[axis] + left % counts[axis]) * x.strides[axis];
            left /= counts[axis];
        }
        const double value = double(widen(*reinterpret_cast<const T*>(at)));
        low = minimum(low, value), high = maximum(high, value);
    }
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) {
        low = minimum(low, __shfl_xor_sync(~0u, low, step));
        high = maximum(high, __shfl_xor_sync(~0u, high, step));
    }
    return {low, high};
}

}  // namespace numpy
