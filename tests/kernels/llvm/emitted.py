"""Small functions of IR, compiled and called: what the tests of emitted code share."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
from llvmlite import binding, ir

from tileattn.kernels.llvm.compile import host, machine, optimized
from tileattn.kernels.llvm.instructions.code import I64, POINTER, Code
from tileattn.kernels.llvm.target import AVX2, AVX512, GENERIC, NEON, Target

_ARCHITECTURE = host().triple.partition("-")[0].replace("arm64", "aarch64")
on_targets = pytest.mark.parametrize(
    "target",
    [
        target
        for target in (AVX512, AVX2, NEON, GENERIC)
        if target.triple.startswith(_ARCHITECTURE) and target.vector_bytes <= host().vector_bytes
    ],
    ids=lambda target: target.name,
)


_engines: dict[tuple[str, Target], Any] = {}
"""Compiled functions: the same code is compiled once."""


def call(target: Target, dtype: str, body: Callable[..., None], *arguments: Any) -> None:
    """Compile ``body(code, *values)`` and call it with arrays, by address, and integers."""
    integers = [isinstance(x, int) for x in arguments]
    module = ir.Module("test")
    kind = ir.FunctionType(ir.VoidType(), [I64 if n else POINTER for n in integers])
    c = Code(ir.Function(module, kind, "test"), target, dtype)
    body(c, *c.function.args)
    c.b.ret_void()
    made_from = str(module), target
    if made_from not in _engines:
        _engines[made_from] = binding.create_mcjit_compiler(
            optimized(module, target), machine(target)
        )
        _engines[made_from].finalize_object()
    types = [ctypes.c_int64 if n else ctypes.c_void_p for n in integers]
    function = ctypes.CFUNCTYPE(None, *types)(_engines[made_from].get_function_address("test"))
    function(*(x if isinstance(x, int) else x.ctypes.data for x in arguments))
