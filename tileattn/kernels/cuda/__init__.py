"""The CUDA kernels: their families, plans, sources, and the compiler that loads them."""
