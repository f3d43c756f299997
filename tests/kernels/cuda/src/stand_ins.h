// Stands in for types.cuh, so that a C++ compiler takes the sources: a warp has one lane, and a thread
// block one thread at a time.
#pragma once
#include <math.h>
#include <string.h>
#include <algorithm>
#include <limits>
#include <utility>
#define __device__
#define __shared__ static
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
using std::max, std::min;
using i64 = long long;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr int WARP = 1;
struct int2 { int x, y; };
inline struct { int x, y, z; } threadIdx, blockIdx, blockDim, gridDim;

// --- elements -------------------------------------------------------------------------------------

struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };
using float32 = float;
using float64 = double;
template <class T> struct AccumOf { using type = float; };
template <> struct AccumOf<double> { using type = double; };
template <class T> constexpr bool HAS_FINITE_SUMS = false;
template <> constexpr bool HAS_FINITE_SUMS<float16> = true;

template <class To, class From> To same_bits(From x) {
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline float __uint_as_float(u32 x) { return same_bits<float>(x); }
inline u32 __float_as_uint(float x) { return same_bits<u32>(x); }
inline u32 __float_as_uint(double) { return 0; }  // sums in float64 have no halves

inline float widen(float16 x) { return float(same_bits<_Float16>(x.bits)); }
inline float widen(bfloat16 x) { return __uint_as_float(u32(x.bits) << 16); }
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
template <class T> T narrow(float x) { return T(x); }
template <class T> T narrow(double x) { return T(x); }
template <> inline float16 narrow<float16>(float x) {
    return {same_bits<unsigned short>(static_cast<_Float16>(x))};
}
template <> inline bfloat16 narrow<bfloat16>(float x) {
    const u32 bits = __float_as_uint(x);
    return {(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <> inline float16 narrow<float16>(double x) { return narrow<float16>(float(x)); }
template <> inline bfloat16 narrow<bfloat16>(double x) { return narrow<bfloat16>(float(x)); }

// --- arithmetic -----------------------------------------------------------------------------------

template <class T> T infinity() { return std::numeric_limits<T>::infinity(); }
template <class T> T largest() { return std::numeric_limits<T>::max(); }
template <class T> T clip_finite(T x) { return fmin(fmax(x, -largest<T>()), largest<T>()); }
inline bool is_finite(float x) { return fabsf(x) < infinity<float>(); }
inline float exp2_of(float x) {  // subnormal results are 0
    const float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y;
}
inline float log2_of(float x) { return log2f(x); }
template <class T> T difference(T x, T y) { return x - y; }
template <class T> T rounded_product(T x, T y) { return x * y; }
inline float product_up(float x, float y) {
    const double exact = double(x) * y;
    const float near = float(exact);
    return near < exact ? nextafterf(near, INFINITY) : near;
}
inline float quotient_to_2_ulp(float x, float y) { return x / y; }
inline float reciprocal_of(float x) { return 1 / x; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline u32 __umulhi(u32 x, u32 y) { return u32(u64(x) * y >> 32); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __ffs(u32 x) { return __builtin_ffs(int(x)); }
template <class T> T atomicAdd(T* x, int n) { return (*x += n) - n; }
template <class T> T atomicOr(T* x, T bits) { return std::exchange(*x, *x | bits); }
template <class T> void hide(T&) {}

// --- other lanes and threads ----------------------------------------------------------------------

inline bool __all_sync(u32, bool x) { return x; }
inline bool __any_sync(u32, bool x) { return x; }
inline u32 __ballot_sync(u32, bool x) { return x; }
template <class T> T __shfl_sync(u32, T x, int) { return x; }
template <class T> T __shfl_up_sync(u32, T x, int) { return x; }
template <class T> T __shfl_xor_sync(u32, T x, int) { return x; }
inline void __syncwarp() {}
inline void __syncthreads() {}
inline bool __syncthreads_or(bool x) { return x; }
inline int __syncthreads_count(bool x) { return x; }
