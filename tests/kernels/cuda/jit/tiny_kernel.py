"""A kernel of four lines, with a header, for the tests of compiling and loading."""

from pathlib import Path

import pytest

from tileattn.errors import BackendUnavailableError
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import Compiled, compiled, nvrtc_version, sources_in

HEADER = "inline float twice(float x) { return 2 * x; }\n"
SOURCE = """
#include "twice.cuh"
extern "C" __global__ void tiny(float* x) {
    static_assert(KEY_HEAD_DIM % 16 == 0, "columns come in sixteens");
    x[threadIdx.x] = twice(x[threadIdx.x]) + KEY_HEAD_DIM;
}
"""
KEY = KernelKey("tiny", "float32")


def need_compiler() -> None:
    """Skip the test without a compiler."""
    try:
        nvrtc_version()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def written(folder: Path) -> Path:
    """Write the sources into a new folder; without a compiler, skip."""
    need_compiler()
    folder.mkdir()
    (folder / "tiny.cu").write_text(SOURCE)
    (folder / "twice.cuh").write_text(HEADER)
    return folder


def make(
    folder: Path, key: KernelKey = KEY, arch: str = "sm_80", *, force: bool = False
) -> Compiled:
    """Compile as a new process would: it reads the sources again."""
    sources_in.cache_clear()
    return compiled(key, arch, (folder,), force=force)
