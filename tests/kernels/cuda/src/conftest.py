"""One disk cache for all tests of the sources, and a compiler for those that read only its log."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tileattn.errors import KernelCompileError
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import SOURCES, Compiled, compiled, nvrtc_version


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let processes and later runs share a cache. An entry has the compiler's log, too."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)  # None: no:cacheprovider
    folder = cache.mkdir("kernels") if cache else tmp_path
    folder.chmod(0o700)  # the disk cache trusts no folder that others can write to
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(folder))
    return folder


def _compiled(key: KernelKey, arch: str, folders: tuple[Path, ...]) -> Compiled | str:
    """Return the kernel, or the message of the error, which does not travel between processes."""
    try:
        return compiled(key, arch, folders, options=("--Ofast-compile=max",))
    except KernelCompileError as error:
        return str(error)


@pytest.fixture(scope="session")
def compiled_quickly() -> Iterator[Callable[..., Compiled]]:
    """Return a function that compiles a kernel whose errors and warnings are read, nothing else.

    With little optimisation NVRTC takes a quarter of the time. It says the same about the text, and
    ptxas about each instruction and the memory. Only notes on wgmma depend on the optimisation.
    NVRTC 13.5 keeps the option for all programs of a process, which therefore does nothing else.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:

        def run(key: KernelKey, arch: str, folders: tuple[Path, ...] = (SOURCES,)) -> Compiled:
            if nvrtc_version() < (12, 9) or key.kernel.endswith("_sm90"):
                return compiled(key, arch, folders)
            made = process.submit(_compiled, key, arch, folders).result()
            assert isinstance(made, Compiled), made
            return made

        yield run
