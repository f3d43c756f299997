// Layer 3. Scalar versions of NumPy's functions, with NumPy's names: generated score_mod and mask_mod
// functions call them. Integers are int if no result overflows; i64 wraps around.
#pragma once

#include "config.cuh"
#include "quick.cuh"

// An array that score_mod or mask_mod reads: sizes, and strides in bytes.
template <int AXES>
struct AuxArray {
    const char* data;
    i64 sizes[AXES > 0 ? AXES : 1], strides[AXES > 0 ? AXES : 1];

    // Clamp an index to the array.
    __device__ static i64 nearest(i64 index, i64 last) { return max(min(index, last), i64(0)); }
    __device__ static i64 nearest(int index, i64 last) {
        return max(min(index, int(min(last, i64(0x7fffffff)))), 0);
    }
};

__device__ inline bool widen(bool x) { return x; }
__device__ inline i64 widen(signed char x) { return x; }
__device__ inline i64 widen(short x) { return x; }
__device__ inline i64 widen(int x) { return x; }
__device__ inline i64 widen(i64 x) { return x; }
__device__ inline i64 widen(unsigned char x) { return x; }
__device__ inline i64 widen(unsigned short x) { return x; }
__device__ inline i64 widen(u32 x) { return x; }

namespace numpy {

// Negative indices count from the end.
__device__ inline i64 from_start(i64 index, i64 size) { return index < 0 ? index + size : index; }

template <class T, int AXES, class... Index>
__device__ inline auto element(const AuxArray<AXES>& x, Index... index) {
    const char* at = x.data;
    int axis = 0;
    ((at += x.nearest(index, x.sizes[axis] - 1) * x.strides[axis], ++axis), ...);
    return widen(*reinterpret_cast<const T*>(at));
}

// --- arithmetic: each operation is rounded ------------------------------------------------------

__device__ inline int add(int x, int y) { return x + y; }
__device__ inline i64 add(i64 x, i64 y) { return i64(u64(x) + u64(y)); }
__device__ inline float add(float x, float y) { return __fadd_rn(x, y); }
__device__ inline double add(double x, double y) { return __dadd_rn(x, y); }

__device__ inline int subtract(int x, int y) { return x - y; }
__device__ inline i64 subtract(i64 x, i64 y) { return i64(u64(x) - u64(y)); }
__device__ inline float subtract(float x, float y) { return difference(x, y); }
__device__ inline double subtract(double x, double y) { return difference(x, y); }

__device__ inline int multiply(int x, int y) { return x * y; }
__device__ inline i64 multiply(i64 x, i64 y) { return i64(u64(x) * u64(y)); }
__device__ inline float multiply(float x, float y) { return rounded_product(x, y); }
__device__ inline double multiply(double x, double y) { return rounded_product(x, y); }

__device__ inline float divide(float x, float y) {
    return IS_16_BIT ? quick_quotient(x, y) : x / y;
}
__device__ inline double divide(double x, double y) { return x / y; }

// A score before it is scaled. Adding to it is one fma, with a single rounding.
struct Product {
    Accum factor, x;
    __device__ operator Accum() const { return rounded_product(factor, x); }
};
__device__ inline Accum add(Product s, Accum y) { return fma(s.factor, s.x, y); }
__device__ inline Accum add(Accum x, Product s) { return add(s, x); }
__device__ inline Accum add(Product s, Product t) { return add(s, Accum(t)); }
__device__ inline Accum subtract(Product s, Accum y) { return add(s, -y); }
__device__ inline Accum subtract(Accum x, Product s) { return fma(-s.factor, s.x, x); }
__device__ inline Accum subtract(Product s, Product t) { return subtract(s, Accum(t)); }

// A divisor that is the same for all pairs: its reciprocal is computed once.
struct Divisor {
    Accum y, inverse;
    __device__ explicit Divisor(Accum y) : y(y), inverse(divide(Accum(1), y)) {}
};
__device__ inline Accum divide(Accum x, Divisor y) {
    return IS_16_BIT ? rounded_product(x, y.inverse) : divide(x, y.y);
}

__device__ inline i64 negative(i64 x) { return subtract(i64(0), x); }
template <class T>
__device__ inline T negative(T x) {
    return -x;
}

template <class T>
__device__ inline T absolute(T x) {
    return x < 0 ? negative(x) : x;
}
__device__ inline float absolute(float x) { return fabs(x); }
__device__ inline double absolute(double x) { return fabs(x); }

template <class T>
__device__ inline T sign(T x) {
    return x > 0 ? T(1) : x < 0 ? T(-1) : x == 0 ? T(0) : x;
}

// For non-negative numbers and a positive divisor no correction is needed.
__device__ inline u32 floor_divide(u32 x, u32 y) { return x / y; }
__device__ inline u32 remainder(u32 x, u32 y) { return x % y; }

// Rounds down; returns 0 for a divisor of 0.
template <class T>
__device__ inline T floor_divide(T x, T y) {
    if (y == 0) return 0;
    if (y == -1) return negative(x);
    const T quotient = x / y;
    return quotient - (x % y != 0 && (x < 0) != (y < 0));
}

// The remainder has the sign of the divisor.
template <class T>
__device__ inline T remainder(T x, T y) {
    if (y == 0 || y == -1) return 0;
    const T rest = x % y;
    return rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest;
}

__device__ inline float remainder_of(float x, float y) { return ::fmodf(x, y); }
__device__ inline double remainder_of(double x, double y) { return ::fmod(x, y); }
template <class T>
__device__ inline T floating_remainder(T x, T y) {
    const T rest = remainder_of(x, y);
    if (rest == 0) return ::copysign(T(0), y);
    return (rest < 0) != (y < 0) ? rest + y : rest;
}
__device__ inline float remainder(float x, float y) { return floating_remainder(x, y); }
__device__ inline double remainder(double x, double y) { return floating_remainder(x, y); }

// NaN propagates.
template <class T>
__device__ inline T minimum(T x, T y) {
    return x <= y || x != x ? x : y;
}
template <class T>
__device__ inline T maximum(T x, T y) {
    return x >= y || x != x ? x : y;
}

// --- functions of floats ------------------------------------------------------------------------

template <class T>
__device__ inline T power(T x, T y) {
    return ::pow(x, y);
}
template <class T>
__device__ inline T exp(T x) {
    return ::exp(x);
}
template <class T>
__device__ inline T log(T x) {
    return ::log(x);
}
template <class T>
__device__ inline T log2(T x) {
    return ::log2(x);
}
template <class T>
__device__ inline T expm1(T x) {
    return ::expm1(x);
}
template <class T>
__device__ inline T log1p(T x) {
    return ::log1p(x);
}
template <class T>
__device__ inline T erf(T x) {
    return ::erf(x);
}
template <class T>
__device__ inline T sigmoid(T x) {
    return divide(T(1), add(T(1), exp(-x)));
}
template <class T>
__device__ inline T arctan(T x) {
    return ::atan(x);
}
__device__ inline float tanh(float x) { return IS_16_BIT ? quick_tanh(x) : ::tanh(x); }
__device__ inline double tanh(double x) { return ::tanh(x); }
template <class T>
__device__ inline T sin(T x) {
    return ::sin(x);
}
template <class T>
__device__ inline T cos(T x) {
    return ::cos(x);
}
template <class T>
__device__ inline T sqrt(T x) {
    return ::sqrt(x);
}
template <class T>
__device__ inline T floor(T x) {
    return ::floor(x);
}
template <class T>
__device__ inline T ceil(T x) {
    return ::ceil(x);
}
template <class T>
__device__ inline T rint(T x) {  // ties to even
    return ::rint(x);
}

// Rounds towards zero. A number outside the range of i64 becomes the smallest i64.
template <class T>
__device__ inline i64 truncate(T x) {
    constexpr T BOUND = T(9223372036854775808.0);
    return x >= -BOUND && x < BOUND ? i64(x) : i64(1ull << 63);
}

template <class T>
__device__ inline T nan() {
    return infinity<T>() - infinity<T>();
}

// --- comparisons, choice and bits ---------------------------------------------------------------

template <class T>
__device__ inline bool less(T x, T y) {
    return x < y;
}
template <class T>
__device__ inline bool less_equal(T x, T y) {
    return x <= y;
}
template <class T>
__device__ inline bool equal(T x, T y) {
    return x == y;
}
template <class T>
__device__ inline bool not_equal(T x, T y) {
    return x != y;
}

template <class T>
__device__ inline T where(bool condition, T x, T y) {
    return condition ? x : y;
}

template <class T>
__device__ inline T bitwise_and(T x, T y) {
    return x & y;
}
template <class T>
__device__ inline T bitwise_or(T x, T y) {
    return x | y;
}
template <class T>
__device__ inline T bitwise_xor(T x, T y) {
    return x ^ y;
}
template <class T>
__device__ inline T invert(T x) {
    return ~x;
}
__device__ inline bool invert(bool x) { return !x; }

// Shifts by 64 or more places shift out all bits.
__device__ inline i64 left_shift(i64 x, i64 places) {
    return u64(places) < 64 ? i64(u64(x) << places) : 0;
}
__device__ inline i64 right_shift(i64 x, i64 places) {
    return x >> (u64(places) < 64 ? places : i64(63));
}

}  // namespace numpy
