"""Every probe compiles, and each field of the parameter block lies where kernels read it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.probes import keys
from tests.probes.harness import PROBES
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import SOURCES, Compiled, compiled, nvrtc_version
from tileattn.kernels.cuda.plan.params import PARAMS

pytestmark = pytest.mark.usefixtures("nvrtc")


ARCHS = ("sm_75", "sm_80", "sm_90a")
FIRST = {key.kernel: key for key in reversed(keys.KEYS)}
"""A key of each probe, compiled for all GPUs and by the quick tests; the others alternate."""
CASES = [
    (key, arch)
    for turn, key in enumerate(keys.KEYS)
    for n, arch in enumerate(ARCHS)
    if key == FIRST[key.kernel] or turn % len(ARCHS) == n
]


@pytest.mark.parametrize(
    ("key", "arch"),
    [
        pytest.param(
            key,
            arch,
            id=f"{keys.name_of(key)}-{arch}",
            marks=[pytest.mark.slow] * (key != FIRST[key.kernel] or arch == "sm_80"),
        )
        for key, arch in CASES
    ],
)
def test_a_probe_compiles(
    key: KernelKey, arch: str, compiled_quickly: Callable[..., Compiled]
) -> None:
    is_first = key == FIRST[key.kernel]
    made = (compiled if is_first else compiled_quickly)(key, arch, (SOURCES, PROBES))
    assert made.image.startswith(b"\x7fELF")
    assert "warning" not in made.log, made.log


def offsets_of(dtype: np.dtype[np.void], outer: str = "", start: int = 0) -> Iterator[str]:
    """Say in C++ where each field of the block lies, the nested ones too."""
    for name, (inner, offset, *_) in (dtype.fields or {}).items():
        field = outer + name
        yield f"static_assert(__builtin_offsetof(Params, {field}) == {start + offset});"
        yield f"static_assert(sizeof(Params::{field.partition('.')[0]}) % {inner.itemsize} == 0);"
        yield from offsets_of(inner, f"{field}.", start + offset)


def test_fields_of_the_parameters_lie_at_the_same_places(tmp_path: Path) -> None:
    if nvrtc_version() < (13, 5):
        pytest.skip("this NVRTC has no offsetof")
    size = f"static_assert(sizeof(Params) == {PARAMS.itemsize});"
    lines = ['#include "params.cuh"', size, *offsets_of(PARAMS)]
    (tmp_path / "layout.cu").write_text("\n".join(lines), encoding="utf-8")
    key = KernelKey("layout", "float32")
    assert compiled(key, "sm_80", (SOURCES, tmp_path)).image
