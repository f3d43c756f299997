"""Kernels for CPUs compile for every target, in vectors of its own width, and are kept on disk."""

import functools
import gc
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")

from llvmlite import binding, ir
from llvmlite.binding import newpassmanagers

from tests.test_architecture import MODULES, module_of, own_imports
from tileattn.dtypes import DTYPES
from tileattn.kernels import disk_cache as cache
from tileattn.kernels.llvm import compile as compiling
from tileattn.kernels.llvm.instructions.code import YIELD
from tileattn.kernels.llvm.target import AMX, AVX2, AVX512, AVX512_BF16, GENERIC, NEON, Target

PASSES = ("forward", "backward")
PATTERNS = {
    AVX512: ("vfmadd", "%zmm"),
    AVX512_BF16: ("vdpbf16ps", "%zmm"),
    AVX2: ("vfmadd", "%ymm"),
    NEON: ("fmla", ".4s"),
}
"""The multiply-adds of whole registers."""


@functools.cache
def assembly(name: str, target: Target) -> str:
    """Compile to text in place of machine code, once for all tests."""
    dtype = "bfloat16" if target.bf16 else "float32"
    module = compiling.optimized(
        compiling.emitted(compiling.Module(name, target, dtype, "float32")), target
    )
    text: str = compiling.machine(target).emit_assembly(module)
    return text


@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "arm64-apple-darwin24.1.0"])
def test_every_64_bit_arm_has_neon(triple: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM names no features of Apple's CPUs, nor of any CPU under an emulator."""
    monkeypatch.setattr(compiling, "_cpu", lambda: (triple, "apple-m4", binding.FeatureMap()))
    found = compiling.host.__wrapped__()
    assert (found.name, found.triple, found.half) == (NEON.name, triple, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("target", PATTERNS, ids=lambda t: t.name)
def test_products_use_whole_registers(name: str, target: Target) -> None:
    code, register = PATTERNS[target]
    lines = [line for line in assembly(name, target).splitlines() if code in line]
    whole = [line for line in lines if register in line]
    block = 16 if target.bf16 else target.rows * target.vectors
    assert len(whole) > block


@pytest.mark.parametrize("name", PASSES)
def test_tiles_of_amx_are_configured_and_released(name: str) -> None:
    text = assembly(name, AMX)
    functions = compiling.names_of(name, AMX)
    assert all(f"\n{function}:" in text for function in functions)
    assert text.count("ldtilecfg") == text.count("tilerelease") == len(functions)
    assert text.count("tdpbf16ps") >= 2 * 2 + 2 + 2 + 1  # of every block of sums


TARGETS = (AVX512, AVX2, NEON, GENERIC)


def kernels() -> Iterator[Any]:
    """List kernel, dtype and target: every dtype for each target; half of the pairs are slow.

    ``assembly`` compiles float32 for all targets but the generic one.
    """
    for n, name in enumerate(compiling.MODULES):
        for m, dtype in enumerate(map(str, DTYPES)):
            for o, target in enumerate(TARGETS):
                done = dtype == "float32" and name in PASSES and target in PATTERNS
                if not done and (dtype != "float16" or target.half):
                    marks = () if (m - o - n) % 4 == 0 else pytest.mark.slow
                    yield pytest.param(name, dtype, target, marks=marks)


@pytest.mark.parametrize(
    ("name", "dtype", "target"), list(kernels()), ids=lambda x: getattr(x, "name", x)
)
def test_every_kernel_compiles_for_every_target(name: str, dtype: str, target: Target) -> None:
    sums = "float64" if dtype == "float64" else "float32"
    code = compiling.object_code(compiling.Module(name, target, dtype, sums))
    assert compiling.MODULES[name][-1].encode() in code


@pytest.mark.parametrize(
    ("target", "name"), [(AVX512, "matmul_8x3"), (AVX512_BF16, "bf16_matmul_4x4")]
)
def test_a_register_block_stays_in_registers(target: Target, name: str) -> None:
    """The loop of the widest matmul spills no sum to the stack."""
    lines = assembly("forward", target).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"{name}:"))
    end = next(n for n in range(start, len(lines)) if f".size\t{name}" in lines[n])
    assert not [line for line in lines[start:end] if "zmm" in line and "(%rsp)" in line]


def test_code_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path / "cache"))
    given = compiling.Module("forward", compiling.host(), "float32", "float32")
    compiling._functions.clear()
    first = compiling.functions(given)
    assert len(cache.entries()) == 1
    monkeypatch.setattr(compiling, "object_code", None)  # nothing is compiled again
    compiling._functions.clear()
    assert len(compiling.functions(given)) == len(first) == 1
    compiling._functions.clear()


def test_code_lives_as_long_as_it_is_cached_or_a_function_of_it_lives() -> None:
    compiling._functions.clear()
    given = compiling.Module("forward", compiling.host(), "float32", "float32")
    functions = compiling.functions(given)
    code = ref(functions[0].code)  # type: ignore[attr-defined] # of this object
    assert compiling.functions(given) is functions
    compiling._functions.clear()
    one = functions[0]
    del functions
    assert code() is not None
    del one
    assert code() is None


def test_a_pass_manager_is_freed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[Any] = []
    monkeypatch.setattr(newpassmanagers.NewPassManager, "_dispose", freed.append)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "nothing")
    ir.IRBuilder(function.append_basic_block()).ret_void()
    compiling.optimized(module, compiling.host())
    gc.collect()
    assert len(freed) == 1


def test_every_source_that_shapes_code_is_in_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = compiling.Module("backward", AVX2, "float32", "float32")
    *folders, file = compiling.SOURCES
    copies = [shutil.copytree(x, tmp_path / x.name) for x in folders]
    copies.append(Path(shutil.copy(file, tmp_path / file.name)))
    monkeypatch.setattr(compiling, "SOURCES", copies)
    monkeypatch.setattr(compiling, "_sources", compiling._sources.__wrapped__)
    keys = {compiling.key_of(given)}
    sources = sorted(tmp_path.rglob("*.py"))
    for n, path in enumerate(sources, 2):
        path.write_text(path.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
        keys.add(compiling.key_of(given))
        assert len(keys) == n, path


def test_no_module_that_kernels_are_built_with_is_missing_from_the_key() -> None:
    """Follow the imports of what emits IR to the last of them."""
    found: set[str] = set()
    left = {f"kernels.llvm.{name}" for name in compiling.MODULES}
    found.add("messages")  # has only the words of errors
    while left:
        found |= left
        paths = {path for path in MODULES if module_of(path) in left}
        left = set().union(*map(own_imports, paths)) - found
    assert {"kernels.llvm.target", "expressions.derivative", "expressions.build"} <= found
    paths = {path for path in MODULES if module_of(path) in found - {"messages"}}
    outside = {path for path in paths if not {path, *path.parents}.intersection(compiling.SOURCES)}
    assert outside == set()


def test_llvm_verifies_what_is_emitted() -> None:
    module = compiling.emitted(compiling.Module("backward", AVX2, "bfloat16", "float32"))
    binding.parse_assembly(str(module)).verify()


@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
@pytest.mark.parametrize("name", PASSES)
def test_what_an_object_needs_of_others(name: str, tmp_path: Path) -> None:
    """A mathematical function would be slow, and another on each machine.

    Where the process has little room, what code refers to may be far away; LLVM then ends the
    process at an address of 32 bits.
    """
    path = tmp_path / "object.o"
    path.write_bytes(
        compiling.object_code(compiling.Module(name, compiling.host(), "bfloat16", "float32"))
    )

    def listed(option: str, word: str) -> list[list[str]]:
        command = ["objdump", option, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [line.split() for line in done.stdout.splitlines() if word in line]

    undefined = {symbol[-1] for symbol in listed("-t", "*UND*")} - {"_GLOBAL_OFFSET_TABLE_"}
    assert undefined <= {*compiling.MEMORY, YIELD}
    assert all(kind.endswith("64") for _, kind, _ in listed("-r", " R_X86_64_"))
