// Layer 1. Element types by their NumPy names, and conversions to and from the accumulator type.
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int WARP = 32;  // threads

struct float16 {
    unsigned short bits;
};
struct bfloat16 {
    unsigned short bits;
};
using float32 = float;
using float64 = double;

// Types of keys and values in caches of 8 bits.
struct float8_e4m3fn {
    unsigned char bits;
};
struct int8 {
    signed char bits;
};

// The accumulator type is float; double for float64.
template <class T>
struct AccumOf {
    using type = float;
};
template <>
struct AccumOf<double> {
    using type = double;
};

// True if no sum of finite elements that fit in memory overflows float.
template <class T>
constexpr bool HAS_FINITE_SUMS = false;
template <>
constexpr bool HAS_FINITE_SUMS<float16> = true;

__device__ inline float widen(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ inline float widen(bfloat16 x) { return __uint_as_float(u32(x.bits) << 16); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(float8_e4m3fn x) {
    const u32 bits = x.bits, size = bits & 0x7f;
    const u32 nan = size == 0x7f ? 0x7fc00000 : 0;
    // The exponents of float32 begin 120 lower.
    return __uint_as_float(
        __float_as_uint(__uint_as_float((bits & 0x80) << 24 | size << 20) * 0x1p120f) | nan);
}
__device__ inline float widen(int8 x) { return float(x.bits); }

template <class T>
__device__ inline T narrow(float x);
template <class T>
__device__ inline T narrow(double x);

template <>
__device__ inline float16 narrow<float16>(float x) {
    float16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <>
__device__ inline bfloat16 narrow<bfloat16>(float x) {
    bfloat16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    // Round to nearest, ties to even; NaN stays NaN.
    const u32 bits = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#endif
    return y;
}
template <>
__device__ inline float narrow<float>(float x) {
    return x;
}
template <>
__device__ inline double narrow<double>(double x) {
    return x;
}
// To 8 bits, as quantise.py: rounded to the nearest number, ties to even. Larger numbers become the largest.
// int8 has no NaN: it becomes 0.
template <class T>
constexpr float LARGEST_8_BIT = 448;
template <>
constexpr float LARGEST_8_BIT<int8> = 127;
template <>
__device__ inline int8 narrow<int8>(float x) {
    const float most = LARGEST_8_BIT<int8>;
    return {static_cast<signed char>(x != x ? 0 : int(rintf(fminf(fmaxf(x, -most), most))))};
}
template <>
__device__ inline float8_e4m3fn narrow<float8_e4m3fn>(float x) {
    const float size = fminf(fabsf(x), LARGEST_8_BIT<float8_e4m3fn>);
    const u32 bits = __float_as_uint(size);
    // Below 2**-6 the numbers are multiples of 2**-9. From there on they have three bits of fraction.
    const u32 normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    const u32 small = u32(rintf(size * 0x1p9f));
    const u32 found = x != x ? 0x7f : size < 0x1p-6f ? small : normal;
    return {static_cast<unsigned char>((__float_as_uint(x) >> 24 & 0x80) | found)};
}
template <>
__device__ inline float narrow<float>(double x) {
    return float(x);
}
template <>
__device__ inline double narrow<double>(float x) {
    return x;
}
template <>
__device__ inline float16 narrow<float16>(double x) {
    return narrow<float16>(float(x));
}
template <>
__device__ inline bfloat16 narrow<bfloat16>(double x) {
    return narrow<bfloat16>(float(x));
}

// Pack two numbers into one register, the first in the lower half.
template <class T>
__device__ inline u32 pack(float low, float high) {
    return u32(narrow<T>(low).bits) | u32(narrow<T>(high).bits) << 16;
}
#if __CUDA_ARCH__ >= 800
template <>
__device__ inline u32 pack<float16>(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
template <>
__device__ inline u32 pack<bfloat16>(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif

template <class S>
__device__ inline S infinity() {
    return S(__uint_as_float(0x7f800000));
}
template <class S>
__device__ inline S largest();
template <>
__device__ inline float largest<float>() {
    return __uint_as_float(0x7f7fffff);
}
template <>
__device__ inline double largest<double>() {
    return 1.7976931348623157e+308;
}

__device__ inline float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// exp2 in float64, within 1 ulp. Results below 2**-1022 are 0. Unlike exp2 it has no branch, so the
// compiler interleaves several of them, also with an mma. The polynomial interpolates (2**f - 1) / f for f
// from -1/2 to 1/2 at Chebyshev nodes.
__device__ inline double exp2_of(double x) {
    constexpr double ROUNDS = 6755399441055744.0;  // 1.5 x 2**52: adding it rounds to an integer
    constexpr double FACTORS[] = {
        0x1.e9d3fe3952179p-32, 0x1.e6063f7217bc6p-28, 0x1.b524fae627834p-24, 0x1.62bfd47773353p-20,
        0x1.ffcbfc670dcd4p-17, 0x1.430913096fd9fp-13, 0x1.5d87fe78a5276p-10, 0x1.3b2ab6fba1ddap-7,
        0x1.c6b08d704a0c2p-5,  0x1.ebfbdff82c598p-3,  0x1.62e42fefa39efp-1,  1.0};
    const double sum = x + ROUNDS, f = x - (sum - ROUNDS);
    double power = FACTORS[0];
#pragma unroll
    for (int n = 1; n < 12; ++n) power = fma(power, f, FACTORS[n]);
    const u32 high = u32(__double2hiint(x)), size = high & 0x7fffffff;
    const bool small = high - 0xc08ff000 <= 0xfff00000 - 0xc08ff000;  // x <= -1022, or -infinity
    const bool large = size >= 0x40900000;                            // |x| >= 1024, infinity or NaN
    const u32 own = u32(__double2hiint(power)) + (u32(__double2loint(sum)) << 20);
    const u32 limit = max(size, 0x7ff00000u);
    return __hiloint2double(int(small ? 0 : large ? limit : own),
                            small || large ? 0 : __double2loint(power));
}

__device__ inline float log2_of(float x) { return log2f(x); }
__device__ inline double log2_of(double x) { return log2(x); }

// Operations that the compiler must not contract to an fma.
__device__ inline float difference(float x, float y) { return __fsub_rn(x, y); }
__device__ inline double difference(double x, double y) { return __dsub_rn(x, y); }
__device__ inline float product_up(float x, float y) { return __fmul_ru(x, y); }
__device__ inline double product_up(double x, double y) { return __dmul_ru(x, y); }
__device__ inline float rounded_product(float x, float y) { return __fmul_rn(x, y); }
__device__ inline double rounded_product(double x, double y) { return __dmul_rn(x, y); }

// Within 1 ulp.
__device__ inline float reciprocal_of(float x) {
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Within 2 ulp, for divisors below 2**126.
__device__ inline float quotient_to_2_ulp(float x, float y) { return __fdividef(x, y); }
__device__ inline double quotient_to_2_ulp(double x, double y) { return x / y; }

template <class S>
__device__ inline S clip_finite(S x) {
    return fmin(fmax(x, -largest<S>()), largest<S>());
}

__device__ inline bool is_finite(float x) { return fabsf(x) < infinity<float>(); }
__device__ inline bool is_finite(double x) { return fabs(x) < infinity<double>(); }
