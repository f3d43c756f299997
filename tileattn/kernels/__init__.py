"""CUDA kernels: what is compiled, how, with which parameters, and which one serves a problem."""
