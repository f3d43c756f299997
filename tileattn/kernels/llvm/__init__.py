"""The kernels for CPUs: each module emits LLVM IR, as the headers of ``kernels/src`` hold CUDA."""
