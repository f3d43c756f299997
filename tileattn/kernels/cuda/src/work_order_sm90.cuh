// Layer 3. Which work tiles each worker of Hopper's persistent kernels takes, and in which order.
#pragma once

#include "mask.cuh"

// Each group of a CTA is a worker of the scheduler, with its own work tiles. The first groups of all CTAs
// come before the second ones: with few work tiles each SM gets one before any SM gets two.
__device__ inline u32 worker_count() { return gridDim.x * GROUPS; }
__device__ inline u32 worker_of(int group) { return blockIdx.x + gridDim.x * group; }

// The indices of a worker's work tiles, from the dynamic or the static scheduler; the same in each pass.
template <bool SHARED = SPLIT_KV>
struct WorkOrder {
    int group, iteration = -1, index = 0, claimed = 0;

    __device__ explicit WorkOrder(const Params&, int group = 0) : group(group) {}
    __device__ int next(const Params& p) {
        ++iteration;
        return PACKED || p.next_tiles ? next_claimed(p) : next_assigned(p);
    }
    __device__ void restart() { iteration = -1; }

    // Dynamic scheduler: a worker claims the next work tile when it needs one, and records it for later
    // passes. Only lane 0 calls.
    __device__ int next_claimed(const Params& p) {
        if (iteration == 0) return index = int(worker_of(group));
        int successor;
        if (iteration > claimed) {
            successor = int(worker_count() + atomicAdd(p.tile_counter, 1));
            claimed = iteration, p.next_tiles[index] = successor;
        } else {
            successor = p.next_tiles[index];
        }
        return index = uniform(successor, 1);
    }
    // Static scheduler: the host's LPT assignment, or round robin in alternating directions. With a causal
    // mask each work tile is a little shorter than the one before, and workers that drift apart would not
    // share keys in the L2 cache.
    __device__ int next_assigned(const Params& p) const {
        const int workers = int(worker_count()), worker = int(worker_of(group));
        const int first = iteration * workers;
        if (p.assignment) return p.assignment[first + worker];
        return first + (iteration % 2 ? workers - 1 - worker : worker);
    }
};
// The sum over the lanes of a warp. The compiler knows that the result of the instruction is uniform. GPUs
// before compute capability 8.0 compile this only for probes.
__device__ inline int sum_of_warp(int x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(~0u, x);
#else
    for (int step = 1; step < WARP; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
#endif
}

// forward_decode_sm90 does not inline such a function, because the kernel waits for its first instructions.
// forward_sm90 inlines it, because registers would spill around the calls.
#if KEY_BLOCK_Q < 64
#define ONCE_IN_CODE __noinline__
#else
#define ONCE_IN_CODE
#endif

// Split-KV: lengths are on the device, so each worker counts the splits of all sequences, and takes an
// equal number of consecutive work tiles. All splits come for one block of rows, then for the next: workers
// of the same splits begin together, and share keys in the L2 cache. All lanes of a warp construct it.
template <>
struct WorkOrder<true> {
    int iteration = -1, share;
    int block = 0, b = 0, place = 0;  // place: index among the splits of a sequence
    int first_block = 0, first_b = 0, first_place = 0, kv = 0, split = 0;

    __device__ explicit WorkOrder(const Params& p, int group = 0) {
        const int lane = threadIdx.x % WARP, B = int(p.entries);
        auto count = [&](int b) { return b < B ? splits_of(p, b).count * int(p.Hkv) : 0; };
        const int blocks = PACKED ? 1 : block_count<BLOCK_Q>(p, p.group * p.Nq);
        int total = 0;  // of one block of rows
#pragma unroll 1
        for (int n = lane; n < B; n += WARP) total += count(n);
        total = sum_of_warp(total);
        const u32 all = total * blocks, worker = worker_of(group);
        const u32 least = all / worker_count(), more = all % worker_count();
        share = least + (worker < more);
        if (share == 0) return;
        const u32 start = worker * least + min(worker, more);
        first_block = start / total;
        int before = start % total;  // splits of earlier workers from sequence n on
#pragma unroll 1
        for (int n = 0; n < B; n += WARP) {
            const int own = count(n + lane);
            int end = own;
#pragma unroll
            for (int step = 1; step < WARP; step *= 2) {
                const int lower = __shfl_up_sync(~0u, end, step);
                if (lane >= step) end += lower;
            }
            const u32 beyond = __ballot_sync(~0u, end > before);
            if (beyond) {
                const int found = __ffs(beyond) - 1;
                first_b = n + found, first_place = before - __shfl_sync(~0u, end - own, found);
                return;
            }
            before -= __shfl_sync(~0u, end, WARP - 1);
        }
    }

    // The splits of a sequence that some query attends to. An only split also writes rows without keys.
    struct Splits {
        int first, count;
    };
    __device__ ONCE_IN_CODE static Splits splits_of(const Params& p, int b) {
        const Sequence sequence(p, b);
        if (PACKED && !has_few_rows(p, sequence)) return {0, 0};
        if (p.splits == 1) return {0, 1};
        const SlidingWindow window(p, sequence);
        const Range keys = window.key_range(0, window.Nq);
        const int split = int(p.split_keys), first = keys.lo / split;
        return {first, (keys.hi + split - 1) / split - first};
    }
    __device__ bool next(const Params& p) {
        if (++iteration >= share) return false;
        ++place;
        if (iteration == 0) block = first_block, b = first_b, place = first_place;
        Splits splits = splits_of(p, b);
        while (place >= splits.count * int(p.Hkv)) {
            place -= splits.count * int(p.Hkv);
            if (++b == int(p.entries)) b = 0, ++block;
            splits = splits_of(p, b);
        }
        kv = place / splits.count, split = splits.first + place % splits.count;
        return true;
    }
    __device__ void restart() { iteration = -1; }
};
