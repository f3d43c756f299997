"""Kernels for CPUs (``llvm``) and GPUs (``cuda``), and the disk cache of compiled ones."""
