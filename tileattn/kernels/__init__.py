"""CUDA kernels: what is compiled, how, with which parameters, and which ones a call launches."""
