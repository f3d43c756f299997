// Layer 1. Programmatic dependent launch: a kernel of a call starts while the one before it ends.
//
// The host launches every kernel of a plan but the first so (launches.py). All threads of every kernel
// wait_for_prerequisites() before they touch global memory, and before they return. (Some begin
// earlier, see below.) Then nothing is seen too early:
//
// - A kernel completes when all its CTAs have ended. Each of them has waited until the kernel before
//   was complete. So by induction all kernels of the plan before it are complete, too. The first one is
//   launched as ever: all earlier work of the stream comes before it.
// - So behind the wait all that earlier kernels write is there, and what they read may be overwritten.
//   Before the wait a kernel touches shared memory and its parameters alone, tensor maps included: no
//   kernel writes those.
// - What is launched behind the plan as ever waits for the last kernel to complete, and so for all.
//
// Nor does anything wait for ever: the next kernel gets its first CTA when all CTAs of this one have
// started. It takes only room that nobody else needs.
//
// In Hopper's backward pass three kernels overlap, of which the second and the third begin while the
// one before runs. The first one, backward_preprocess, lets them start behind its own wait, so all
// before it is complete. Of packed sequences each waits first.
//
// - backward_sm90 and its like wait for the rows of a head before they take it (row_counter.cuh). A
//   warp of each CTA waits in the end: so they complete behind the first one.
// - backward_dq_convert_sm90: a CTA whose head is complete does not wait (dq_counter.cuh). No kernel
//   before reads the dQ that it writes. The last CTA always waits, so this kernel, too, completes behind
//   the one before.
// - backward_wide_dq_sm90 waits for rows, too. With the one before it shares inputs alone, and FAILED in
//   head_flags, which both may set and neither reads. A warp of each CTA waits in the end.
#pragma once

// Let the next kernel start, once all CTAs have called this or ended. It promises nothing of memory.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait for the kernel before to complete, and for all that it has written.
__device__ inline void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// In place of the wait: begin beside the kernel before. What was complete before that one began is
// there; what the L1 cache still has may be older, and is dropped.
__device__ inline void pass_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// Both of the first two. Persistent kernels only wait: the next one gets its first CTA when theirs
// end, and none that waits stands beside them (measured). Those of the backward pass let it start
// where it has something to do on the SMs that theirs leave.
__device__ inline void overlap_launches() {
    launch_dependents();
    wait_for_prerequisites();
}
