"""Compile IR to functions with LLVM; the disk cache keeps the object code."""

import ctypes
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import finalize

from tileattn.call import options
from tileattn.expressions import nodes
from tileattn.kernels import disk_cache as cache
from tileattn.kernels.llvm.params import BATCHED, Layout
from tileattn.kernels.llvm.target import AMX, AVX2, AVX512, AVX512_BF16, GENERIC, NEON, Target
from tileattn.kernels.llvm.user_functions import LIBRARY, NO_FUNCTIONS, Functions
from tileattn.lru import Lru

MEMORY = ("memset", "memcpy", "memmove")
"""Functions of the C library into which LLVM turns loops."""

MODULES = {
    "forward": ("forward",),
    "decode": ("decode",),
    "backward": ("backward_preprocess", "backward", "backward_dq_convert"),
}
"""Functions of each module; with bfloat16 instructions ``bf16_prepare`` comes first."""

SLOW_TO_REDUCE = {"decode", "forward"}
"""Modules that LLVM compiles without loop strength reduction: it takes 0.55 s for decode, 0.04 s
for forward, and makes decode 4 % slower and forward no faster (Zen 4, both per call)."""

PASSES = ("sroa", "simplify_cfg", "instruction_combine", "simplify_cfg")
"""Passes over the IR. Code generation removes common expressions and hoists invariants; the rest of
LLVM's -O2 takes ten times as long and makes nothing faster but dropout, by 3 % (Zen 4)."""

SOURCES = (Path(__file__).parent, Path(nodes.__file__).parent, Path(options.__file__))
"""What determines the IR: the builders, the expressions of user functions, the table of options."""

Function = Callable[[int, int, int], None]
"""Takes the addresses of the parameters, the task counter and the scratch memory."""

_FUNCTION = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)
_FEATURES = (
    (AVX512, ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c")),
    (AVX2, ("avx2", "fma", "f16c")),
    (GENERIC, ()),
)
_LOADED = 4  # bytes of memory for a byte of object code; LLVM 22's MCJIT on Linux
_MOST_MODULES, _MOST_BYTES = 1536, 128 << 20  # that stay loaded

_lock = threading.RLock()  # a signal handler may call the package while this thread compiles


if hasattr(os, "register_at_fork"):  # in a child, a compilation by another thread never ends
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


@functools.cache
def _cpu() -> tuple[str, str, Any]:
    """Return this machine's target triple, CPU name and CPU features, from LLVM."""
    from llvmlite import binding as llvm

    with _lock:
        return llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features()


@functools.cache
def host() -> Target:
    """Return the target of this CPU."""
    triple, name, features = _cpu()
    kind = next(t for t, needed in _FEATURES if all(features.get(f) for f in needed))
    if triple.startswith(("aarch64", "arm64")):  # LLVM names no features on macOS
        kind = NEON
    given = features.flatten() + (",-prefer-256-bit" if kind is AVX512 else "")
    return replace(kind, triple=triple, cpu=name, features=given)


@functools.cache
def bf16_host() -> Target | None:
    """Return the target with this CPU's bfloat16 instructions, AMX first; None without any."""
    features, usual = _cpu()[2], host()
    if usual.name != AVX512.name or not features.get("avx512bf16"):
        return None
    amx = features.get("amx-tile") and features.get("amx-bf16") and _may_use_tiles()
    kind = AMX if amx else AVX512_BF16
    return replace(kind, triple=usual.triple, cpu=usual.cpu, features=usual.features)


def _may_use_tiles() -> bool:
    """Ask Linux for permission to use AMX tiles, once for all threads of the process."""
    if not sys.platform.startswith("linux"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    library = ctypes.CDLL(None)
    return bool(library.syscall(arch_prctl, request_permission, tile_data) == 0)


class Module(NamedTuple):
    """The specification of a compiled module."""

    name: str  # a key of `MODULES`
    target: Target
    dtype: str  # of q, k and v
    accum_dtype: str  # of sums
    own: Functions = NO_FUNCTIONS  # the caller's functions
    layout: Layout = BATCHED


class _Code:
    """The loaded code of a module; freed after the last of its functions."""

    def __init__(self, module: Module, body: bytes) -> None:
        from llvmlite import binding as llvm

        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine(module.target))
        engine.add_object_file(llvm.ObjectFileRef.from_data(body))
        engine.finalize_object()
        self.nbytes = _LOADED * len(body)
        self.address_of = engine.get_function_address
        finalize(self, _close, engine).atexit = False


def _close(engine: Any) -> None:
    with _lock:  # so that no thread is inside LLVM when another one forks
        engine.close()


def functions(module: Module) -> tuple[Function, ...]:
    """Return the functions of a module in launch order: loaded, from the disk cache, or compiled.

    A function holds its code, which may leave the cache meanwhile.
    """
    with _lock:
        found: tuple[Function, ...] | None = _functions.get(module)
        if found is None:
            name = key_of(module)
            body = cache.read(name)
            if body is None:
                body = object_code(module)
                cache.write(name, body)
            _initialize()
            code = _Code(module, body)
            names = names_of(module.name, module.target)
            made = [_FUNCTION(code.address_of(f)) for f in names]
            for function in made:
                function.code = code  # type: ignore[attr-defined] # of this object, not its class
            found = tuple(made)
            _functions.keep(module, found)
    return found


_functions = Lru(_MOST_MODULES, _MOST_BYTES, size_of=lambda made: int(made[0].code.nbytes))


def key_of(module: Module) -> str:
    """Name a module in the disk cache by everything that shapes its code."""
    import llvmlite
    from llvmlite import binding as llvm

    versions = llvmlite.__version__, llvm.llvm_version_info
    return cache.name_of("llvm", _sources(), versions, *module[:4], module.own.key, module.layout)


def names_of(name: str, target: Target) -> tuple[str, ...]:
    """Return the names of a module's functions, in launch order."""
    return ("bf16_prepare", *MODULES[name]) if target.bf16 else MODULES[name]


def object_code(module: Module) -> bytes:
    """Compile a module; the target may be another than this machine."""
    from llvmlite import binding as llvm

    made = optimized(emitted(module), module.target)
    slow = module.name in SLOW_TO_REDUCE
    llvm.set_option("tileattn", f"-disable-lsr={str(slow).lower()}")
    try:
        code: bytes = machine(module.target).emit_object(made)
    finally:
        llvm.set_option("tileattn", "-disable-lsr=false")
    return code


def emitted(module: Module) -> Any:
    """Emit the IR of a module."""
    from tileattn.kernels.llvm import backward, decode, forward

    builders = {"forward": forward, "decode": decode, "backward": backward}
    name, *facts = module
    return builders[name].build(*facts)


def optimized(module: Any, target: Target) -> Any:
    """Parse, verify and optimize a module with LLVM."""
    from llvmlite import binding as llvm

    _initialize()
    compiler = machine(target)
    module.triple, module.data_layout = target.triple, str(compiler.target_data)
    parsed = llvm.parse_assembly(str(module))
    passes = llvm.create_new_module_pass_manager()
    for name in PASSES:
        getattr(passes, f"add_{name}_pass")()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    passes.run(parsed, llvm.create_pass_builder(compiler, options))
    _free(passes)
    return parsed


def _free(passes: Any) -> None:
    """Free a pass manager of a version of llvmlite that does not, as 0.50: 1.5 MB for a module.

    Its class inherits an empty ``_dispose`` before the one that frees.
    """
    from llvmlite.binding import ffi, newpassmanagers

    if type(passes)._dispose is ffi.ObjectRef._dispose:
        newpassmanagers.NewPassManager._dispose(passes)


def machine(target: Target) -> Any:
    """Return LLVM's code generator for a target."""
    from llvmlite import binding as llvm

    _initialize()
    # On x86 LLVM may put constants more than 2 GiB from the code; on ARM llvmlite keeps them near.
    distance = "large" if target.triple.startswith("x86") else "small"
    return llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=2, reloc="pic", codemodel=distance
    )


@functools.cache
def _initialize() -> None:
    from llvmlite import binding as llvm

    from tileattn.kernels.llvm.instructions.code import YIELD

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    windows = os.name == "nt"
    library = ctypes.CDLL("msvcrt" if windows else None)
    needed = {name: getattr(library, name) for name in MEMORY}
    mathematics = ctypes.CDLL("ucrtbase") if windows else library
    needed |= {f"math_{name}": getattr(mathematics, name) for name in LIBRARY}
    needed[YIELD] = ctypes.CDLL("kernel32").SwitchToThread if windows else library.sched_yield
    for name, function in needed.items():
        llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)


@functools.cache
def _sources() -> str:
    """Digest of the sources that shape IR; read once, when the first module is looked for."""
    paths = [path for source in SOURCES for path in (sorted(source.rglob("*.py")) or [source])]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return hashlib.sha256(repr(texts).encode()).hexdigest()
