"""Compile the kernel of a key with NVRTC, or read it from the wheel or the disk cache.

NVRTC is called directly. CuPy's ``RawModule`` adds ``-ftz=true``, which flushes float32 subnormals
to zero, and its cache does not notice edits of included headers.
"""

import functools
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tileattn.errors import BackendUnavailableError, KernelCompileError
from tileattn.kernels import disk_cache as cache
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit import shipped

SOURCES = Path(__file__).parents[1] / "src"
FUNCTIONS = "functions.cuh"  # a key with `functions` brings its own text for this header

OPTIONS = (
    "-std=c++17",
    "-default-device",
    "--ptxas-options=-v",  # report registers and spills in the log
)

EXTRA_OPTIONS: tuple[str, ...] = ()
"""Compiler options that tools add before the first kernel is loaded; -lineinfo for profilers."""

INSTALL = (
    "pip install 'cupy-cuda13x[ctk]' brings CuPy and NVRTC for drivers from 580 on, "
    "'cupy-cuda12x[ctk]' for older ones"
)

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)

_TIME = re.compile(r"^ptxas info *: Compile time = .*$", re.MULTILINE)
_END = 1 << 16  # bytes at either end of the NVRTC library that identify its build


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel. The resources of PTX are None: only the driver knows them."""

    image: bytes  # machine code (cubin), or PTX
    log: str  # warnings and resources
    cached: bool  # True if it was read, from the wheel or the disk cache
    registers: int | None  # per thread
    spill_bytes: int | None  # per thread, without the functions that the kernel calls
    inputs: str  # digest of its sources and options

    @property
    def body(self) -> bytes:
        """What the wheel and the disk cache keep: the log, NUL and the image."""
        return self.log.encode() + b"\0" + self.image


def compiled(
    key: KernelKey,
    arch: str,
    folders: tuple[Path, ...] = (SOURCES,),
    *,
    force: bool = False,
    ship: bool = True,
    options: tuple[str, ...] = (),
) -> Compiled:
    """Compile a kernel, or read it from the wheel or the disk cache. No GPU is needed.

    Parameters
    ----------
    key : KernelKey
        The kernel.
    arch : str
        A name like ``sm_90a`` for machine code, or like ``compute_90`` for PTX.
    folders : tuple of Path
        Folders of the sources.
    force : bool
        Compile the kernel even if it could be read.
    ship : bool
        False to ignore the kernels that the wheel brings.
    options : tuple of str
        More compiler options.

    Raises
    ------
    ValueError
        If NVRTC does not know ``arch``.
    """
    texts, options = sources_of(key, arch, folders), _options(key, arch, options)
    inputs = hashlib.sha256(repr((texts, options)).encode()).hexdigest()
    body = shipped.read(arch, inputs) if ship and not force else None
    cached = body is not None
    if body is None:
        body, cached = _read_or_compiled(key, checked_arch(arch), texts, options, force)
    said, _, image = body.partition(b"\0")
    log = said.decode()
    return Compiled(image, log, cached, *resources(log, key.kernel), inputs)


def _read_or_compiled(
    key: KernelKey, arch: str, texts: dict[str, str], options: tuple[str, ...], force: bool
) -> tuple[bytes, bool]:
    """Return the body of a kernel, and whether it was in the disk cache."""
    name = cache.name_of("cuda", texts, options, compiler_name(), _build())
    body = None if force else cache.read(name)
    if body is not None:
        return body, True
    with cache.alone(name):
        # Another process may have compiled it while this one waited.
        body = None if force else cache.read(name)
        if body is not None:
            return body, True
        body = _compile(key, arch, texts, options)
        cache.write(name, body)
        return body, False


@functools.cache
def sources_in(folders: tuple[Path, ...]) -> dict[str, str]:
    """Read the sources by name, once per process."""
    return {
        path.name: path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted(folder.iterdir())
        if path.suffix in {".cu", ".cuh"}
    }


def sources_of(key: KernelKey, arch: str, folders: tuple[Path, ...]) -> dict[str, str]:
    """Return the texts of a kernel: its file, and every header that it includes."""
    texts, file = sources_in(folders), f"{key.kernel}.cu"
    if file not in texts:
        names = ", ".join(name for name in texts if name.endswith(".cu"))
        raise KernelCompileError(file, arch, key, compiler_name(), f"there are only: {names}")
    if key.functions:
        texts = texts | {FUNCTIONS: key.functions}
    found: dict[str, str] = {}
    waiting = [file]
    while waiting:
        name = waiting.pop()
        if name in texts and name not in found:
            found[name] = texts[name]
            waiting += _INCLUDE.findall(texts[name])
    return dict(sorted(found.items()))


def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC, or raise BackendUnavailableError."""
    version: tuple[int, int] = _nvrtc().getVersion()
    return version


def known_archs() -> tuple[int, ...]:
    """List the compute capabilities that NVRTC compiles for, times ten."""
    known: tuple[int, ...] = _nvrtc().getSupportedArchs()
    return known


def best_arch(capability: tuple[int, int], known: Iterable[int]) -> str:
    """Choose the target for a GPU among those that the compiler knows, as 75 for 7.5.

    Prefer machine code for the GPU, or for an older one of its generation. If the compiler does not
    know the generation, choose PTX, which the driver translates.
    """
    number = 10 * capability[0] + capability[1]
    best = max((arch for arch in known if arch <= number), default=0)
    if number < 75 or not best:
        needs = "the kernels need 7.5 (Turing) or newer; backend='numpy' needs no GPU"
        if number >= 75:
            needs = (
                "this CUDA supports newer ones only; pip install 'cupy-cuda12x[ctk]' brings another"
            )
        raise BackendUnavailableError(f"the GPU has compute capability {number / 10}: {needs}")
    if best == number == 90:
        return "sm_90a"  # sm_90 lacks wgmma and setmaxnreg
    return f"{'sm' if best // 10 == capability[0] else 'compute'}_{best}"


def checked_arch(arch: str) -> str:
    """Return the name if NVRTC knows it, else raise ValueError."""
    number = re.fullmatch(r"(?:sm|compute)_(\d+)[a-z]?", arch)
    if number is None or int(number[1]) not in known_archs():
        names = ", ".join(f"sm_{known}" for known in known_archs())
        raise ValueError(
            f"arch must be a target of {compiler_name()} ({names}, sm_90a); got {arch!r}"
        )
    return arch


def resources(log: str, kernel: str) -> tuple[int | None, int | None]:
    """Read the registers and the spilled bytes of a kernel from the compiler's log."""
    _, found, rest = log.partition(f"Compiling entry function '{kernel}'")
    if not found:
        return None, None
    part = rest.partition("Compiling entry function")[0]
    registers = re.search(r"Used (\d+) registers", part)
    # Lines of the same form follow for the functions that it calls, which are off the fast path.
    own = rf"Function properties for {kernel}\n.* (\d+) bytes spill stores, (\d+) bytes spill loads"
    spills = re.search(own, part)
    return (
        int(registers[1]) if registers else None,
        sum(map(int, spills.groups())) if spills else None,
    )


def compiler_name() -> str:
    """Name the compiler with its version."""
    major, minor = nvrtc_version()
    return f"NVRTC {major}.{minor}"


@functools.cache
def _build() -> str:
    """Identify the build of NVRTC: its ptxas changes between builds of one version.

    The identity is the size of the library and a digest of its first and last bytes, where an ELF
    file has its build ID and a Windows DLL its time stamp and checksum. A digest of all 140 MB
    would take 80 ms.
    """
    from cuda.pathfinder import load_nvidia_dynamic_lib  # has found it for CuPy already

    with Path(load_nvidia_dynamic_lib("nvrtc").abs_path).open("rb") as library:
        size = library.seek(0, os.SEEK_END)
        library.seek(max(size - _END, 0))
        last = library.read()
        library.seek(0)
        return f"{size} {hashlib.sha256(library.read(_END) + last).hexdigest()}"


def _options(key: KernelKey, arch: str, more: tuple[str, ...]) -> tuple[str, ...]:
    return (*OPTIONS, f"-arch={arch}", *EXTRA_OPTIONS, *more, *key.defines())


def _compile(key: KernelKey, arch: str, texts: dict[str, str], options: tuple[str, ...]) -> bytes:
    """Return the log, NUL and the image. Headers are passed as text: NVRTC reads no files."""
    nvrtc, file = _nvrtc(), f"{key.kernel}.cu"
    # NVRTC 12.9 and later have a cache of their own, which may omit the log.
    if nvrtc_version() >= (12, 9):
        options = (*options, "--no-cache")
    headers = {name: text for name, text in texts.items() if name.endswith(".cuh")}
    program = nvrtc.createProgram(
        texts[file],
        file,
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    try:
        nvrtc.compileProgram(program, options)
        if arch.startswith("compute"):
            image: bytes = nvrtc.getPTX(program)
        else:
            # CuPy strips the last byte, as if it ended a string. It is the high byte of a number.
            image = nvrtc.getCUBIN(program) + b"\0"
        log: str = _TIME.sub("", nvrtc.getProgramLog(program))  # equal builds have equal digests
        return log.strip("\0\n ").encode() + b"\0" + image
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program) or str(error)
        raise KernelCompileError(file, arch, key, compiler_name(), log) from error
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def _nvrtc() -> Any:
    """Import CuPy's binding and make it load the library, which it does at the first call."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(f"CuPy is not installed; {INSTALL}") from error
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise BackendUnavailableError(f"CuPy finds no NVRTC ({reason}); {INSTALL}") from error
    return nvrtc
