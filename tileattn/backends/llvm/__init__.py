"""NumPy arrays on kernels that LLVM compiles for this CPU."""
