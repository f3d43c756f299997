// Stands in for the other lanes and threads of types.cuh, after stand_ins.h: each thread of a block is a fiber.
// Warps meet at shuffles, ldmatrix and mma, blocks at barriers. A fiber runs until it meets others.
#include <ucontext.h>

// Otherwise a library would take static arrays of functions from another one that was loaded before.
#pragma GCC visibility push(hidden)

constexpr int MAX_THREADS = 256, STACK_BYTES = 256 << 10, SHARED_BYTES_OF_BLOCK = 256 << 10;
struct float2 { float x, y; };
struct uint4 { u32 x, y, z, w; };

struct Fiber {
    ucontext_t at;
    char* stack;
    bool done;
};
inline Fiber fibers[MAX_THREADS];
inline ucontext_t scheduler;
inline int current, block_threads;  // the fiber that runs
inline u64 progress;  // meetings that were complete, and fibers that ended
inline void yield() { swapcontext(&fibers[current].at, &scheduler); }

// Threads that wait for each other. Each brings a bit.
struct Meeting {
    int arrived = 0;
    u32 generation = 0;
    bool any = false, all = true, was_any = false, was_all = true;

    void meet(int count, bool x = false) {
        const u32 mine = generation;
        any |= x, all &= x;
        if (++arrived == count) {
            was_any = any, was_all = all;
            arrived = 0, any = false, all = true, ++generation, ++progress;
        }
        while (generation == mine) yield();
    }
};
struct Warp : Meeting {
    u32 slots[32][6];  // what each lane brings
};
inline Meeting block;
inline Warp warps[MAX_THREADS / WARP];
inline Warp& own_warp() { return warps[current / WARP]; }
inline int own_lane() { return current % WARP; }

inline void __syncthreads() { block.meet(block_threads); }
inline bool __syncthreads_or(bool x) { return block.meet(block_threads, x), block.was_any; }
inline bool __syncthreads_and(bool x) { return block.meet(block_threads, x), block.was_all; }
inline void __syncwarp() { own_warp().meet(WARP); }
inline bool __all_sync(u32, bool x) {
    own_warp().meet(WARP, x);
    const bool all = own_warp().was_all;
    return __syncwarp(), all;
}
inline bool __any_sync(u32, bool x) { return !__all_sync(~0u, !x); }

// Let use(slots) read what all lanes have brought.
template <class T, class Use> void share(const T& mine, Use use) {
    static_assert(sizeof mine <= sizeof Warp::slots[0]);
    Warp& warp = own_warp();
    memcpy(warp.slots[own_lane()], &mine, sizeof mine);
    __syncwarp();
    use(warp.slots);
    __syncwarp();
}
template <class T> T __shfl_sync(u32, T x, int from) {
    T found;
    share(x, [&](auto& slots) { memcpy(&found, slots[from % WARP], sizeof found); });
    return found;
}
template <class T> T __shfl_xor_sync(u32 mask, T x, int step) { return __shfl_sync(mask, x, own_lane() ^ step); }
template <class T> T __shfl_up_sync(u32 mask, T x, int step) {
    return __shfl_sync(mask, x, max(0, own_lane() - step));
}
inline u32 __ballot_sync(u32, bool x) {
    u32 all = 0;
    share(u32(x), [&](auto& slots) {
        for (int lane = 0; lane < WARP; ++lane) all |= slots[lane][0] << lane;
    });
    return all;
}

inline char* shared_memory() {
    alignas(1024) static char bytes[SHARED_BYTES_OF_BLOCK];
    return bytes;
}

// --- copy.cuh -------------------------------------------------------------------------------------

inline u32 shared_address(const void* at) { return u32(static_cast<const char*>(at) - shared_memory()); }
// Static shared arrays may lie before the dynamic memory.
inline char* shared_at(u32 address) { return shared_memory() + int(address); }
template <int SIZE> void copy_async(u32 to, const char* from, int valid) {
    if (to % SIZE || u64(from) % SIZE) __builtin_trap();
    memset(shared_at(to), 0, SIZE);
    if (valid) memcpy(shared_at(to), from, valid);
}
template <int SIZE> void copy_async(u32 to, const char* from) { copy_async<SIZE>(to, from, SIZE); }
template <int SIZE> void copy_async_if(u32 to, const char* from, bool wanted) {
    copy_async<SIZE>(to, from, wanted ? SIZE : 0);
}
inline void copy_commit() {}
template <int PENDING> void copy_wait() {}
inline u32 load_shared(u32 at) {
    u32 x;
    memcpy(&x, shared_at(at), 4);
    return x;
}
inline void store_shared(u32 at, u32 x) { memcpy(shared_at(at), &x, 4); }
template <bool TRANSPOSED> void load_matrices_of(u32 (&r)[4], u32 address) {
    if (address % 16) __builtin_trap();
    const int g = own_lane() / 4, t = own_lane() % 4;
    share(address, [&](auto& slots) {
        auto element = [&](int row, int column) {
            unsigned short x;
            memcpy(&x, shared_at(slots[row][0]) + 2 * column, 2);
            return u32(x);
        };
        for (int m = 0; m < 4; ++m)
            r[m] = TRANSPOSED ? element(8 * m + 2 * t, g) | element(8 * m + 2 * t + 1, g) << 16
                              : element(8 * m + g, 2 * t) | element(8 * m + g, 2 * t + 1) << 16;
    });
}
inline void load_matrices(u32 (&r)[4], u32 address) { load_matrices_of<false>(r, address); }
inline void load_matrices_transposed(u32 (&r)[4], u32 address) { load_matrices_of<true>(r, address); }
inline void store_matrices_transposed(u32, const u32 (&)[4]) { __builtin_trap(); }
inline void add_global(float*, float, float, float, float) { __builtin_trap(); }

// --- mma.cuh --------------------------------------------------------------------------------------

// The sum is cut toward zero, as a tensor core cuts it.
template <class A, class B> void multiply_float16(float (&c)[4], const A& a, const B& b) {
    struct { A a; B b; } mine{a, b};
    const int g = own_lane() / 4, t = own_lane() % 4;
    share(mine, [&](auto& slots) {
        auto half = [](u32 pair, int k) {
            return widen(float16{static_cast<unsigned short>(k % 2 ? pair >> 16 : pair)});
        };
        for (int e = 0; e < 4; ++e) {
            const u32 *row = slots[4 * g], *column = slots[4 * (2 * t + e % 2)];
            double sum = c[e];
            for (int k = 0; k < 16; ++k) {
                const int lane = k % 8 / 2 * int(sizeof slots[0] / 4);
                sum += double(half(row[lane + k / 8 * 2 + e / 2], k)) * half(column[lane + 4 + k / 8], k);
            }
            const float near = float(sum);
            c[e] = fabs(double(near)) > fabs(sum) ? nextafterf(near, 0) : near;
        }
    });
}

// --- other intrinsics -----------------------------------------------------------------------------

struct float8_e4m3fn { unsigned char bits; };
struct int8 { signed char bits; };
inline float widen(float8_e4m3fn) { __builtin_trap(); }
inline float widen(int8) { __builtin_trap(); }
inline bool is_finite(double x) { return fabs(x) < infinity<double>(); }
inline double exp2_of(double x) { return exp2(x); }
inline double log2_of(double x) { return log2(x); }
inline double product_up(double x, double y) { return x * y; }
inline double quotient_to_2_ulp(double x, double y) { return x / y; }
template <class T> u32 pack(float low, float high) {
    return u32(narrow<T>(low).bits) | u32(narrow<T>(high).bits) << 16;
}
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    const u64 both = u64(y) << 32 | x;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= u32(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
#define __align__(n) __attribute__((aligned(n)))
#define __cluster_dims__(...)

// Run all threads of a block. Copies to shared memory are complete at once, so a missing wait does not show.
template <class Run> void run_block(int threads, Run run) {
    static Run* running;
    running = &run, block_threads = threads;
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        if (!fiber.stack) fiber.stack = new char[STACK_BYTES];
        fiber.done = false;
        getcontext(&fiber.at);
        fiber.at.uc_stack.ss_sp = fiber.stack, fiber.at.uc_stack.ss_size = STACK_BYTES;
        fiber.at.uc_link = &scheduler;
        makecontext(&fiber.at, +[] { (*running)(), fibers[current].done = true, ++progress; }, 0);
    }
    for (bool any = true; any;) {
        any = false;
        const u64 before = progress;
        for (int i = 0; i < threads; ++i)
            if (!fibers[i].done) {
                any = true, current = i, threadIdx.x = i;
                swapcontext(&scheduler, &fibers[i].at);
            }
        if (any && progress == before) abort();  // threads that have diverged wait for each other
    }
}
