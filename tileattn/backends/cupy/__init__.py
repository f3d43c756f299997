"""CuPy arrays: CUDA kernels on CuPy's current stream."""
