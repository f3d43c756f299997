"""Expressions of the caller's score and mask functions.

`trace` runs a function once on symbolic values and returns an expression, a graph of `nodes`.
Each output has one visitor: `evaluate` (NumPy), `derivative` (another expression), `intervals`
(bounds over ranges of indices; `quadtree` finds the blocks of a mask with them), and in the kernel
rooms ``kernels/llvm/attention/expressions.py`` (LLVM IR) and the CUDA source of a function.
"""
