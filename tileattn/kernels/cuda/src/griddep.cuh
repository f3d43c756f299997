// Layer 1. Programmatic dependent launch: a kernel of a call starts while the one before it ends.
//
// The host launches every kernel of a plan this way, except the first (launches.py). All threads of every
// kernel call wait_for_prerequisites() before they touch global memory, and before they return. (Some
// kernels start earlier, see below.) Then no kernel reads or overwrites data too early:
//
// - A kernel completes when all its CTAs have ended. Each CTA has waited until the previous kernel was
//   complete. By induction all earlier kernels of the plan are complete, too. The first kernel is launched
//   normally, after all earlier work of the stream.
// - So after the wait the results of earlier kernels are visible, and their inputs may be overwritten.
//   Before the wait a kernel touches only shared memory and its parameters. These include tensor maps,
//   which no kernel writes.
// - A normal launch after the plan waits for the last kernel to complete, and so for all of them.
//
// There is no deadlock: the next kernel gets its first CTA when all CTAs of this one have started, and
// takes only space that these do not need.
//
// In Hopper's backward pass three kernels overlap: the second and the third start while the previous one
// runs. The first, backward_preprocess, lets them start after its own wait, so everything before it is
// complete. For packed sequences the second kernel waits first; the one that orders its blocks does not.
//
// - backward_sm90, backward_halves_sm90 and backward_wide_sm90 wait for the rows of a head before they
//   compute it (row_counter.cuh). A warp of each CTA waits at the end, so they complete after the first.
// - backward_dq_convert_sm90: a CTA does not wait if its head is complete (dq_counter.cuh). No earlier
//   kernel reads the dQ that it writes. The last CTA always waits, so this kernel also completes after the
//   previous one.
// - backward_wide_dq_sm90 also waits for rows. It shares only inputs with the previous kernel, and the flag
//   FAILED in head_flags, which both may set and neither reads. A warp of each CTA waits at the end.
// - order_key_blocks compares blocks while backward_preprocess runs. It then reads only offsets and lengths,
//   which were complete before that kernel began. It waits before it stores the order.
//
// forward_combine and forward_fold find the splits of their rows while the kernel of the splits runs. They then read
// only lengths and offsets, which were complete before that kernel began. They wait before they read its sums.
#pragma once

// Let the next kernel start, once all CTAs have called this or ended. It does not order memory.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait for the previous kernel to complete and for its results to be visible.
__device__ inline void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Instead of the wait: start beside the previous kernel. Everything that was complete before that kernel
// started is visible. The fence drops older lines of the L1 cache.
__device__ inline void pass_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// Launch dependents and wait. Persistent kernels only wait: a waiting CTA of the next kernel beside them
// made them slower when measured. The persistent kernels of the backward pass launch the next kernel if it
// has work for the SMs that they leave.
__device__ inline void overlap_launches() {
    launch_dependents();
    wait_for_prerequisites();
}
