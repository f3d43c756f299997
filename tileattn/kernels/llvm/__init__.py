"""The CPU kernels: each module emits LLVM IR, as a header of ``kernels/cuda/src`` holds CUDA."""
