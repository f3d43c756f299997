"""Every kernel compiles for every generation of GPU without a word; tuned ones do not spill."""

import re
from pathlib import Path

import pytest

from tileattn.errors import BackendUnavailableError
from tileattn.kernels import catalog
from tileattn.kernels.compile import compiled, nvrtc_version
from tileattn.kernels.key import KernelKey

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
CASES = [(arch, key) for arch in ARCHS for key in catalog.representative_keys(arch)]

# ptxas says "info" of what costs a kernel its speed, too: wgmma that it had to run one by one.
COMPLAINT = re.compile(r"warning|error|performance loss", re.IGNORECASE)


@pytest.fixture(autouse=True)
def nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile anew, not into the user's cache; without a compiler, skip."""
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path / "cache"))
    try:
        nvrtc_version()
    except BackendUnavailableError as error:
        pytest.skip(str(error))


def name_of(case: tuple[str, KernelKey]) -> str:
    arch, key = case
    return "-".join([arch, key.kernel, *(d.partition("=")[2] for d in key.defines()[1:])])


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_kernel_compiles(case: tuple[str, KernelKey]) -> None:
    arch, key = case
    made = compiled(key, arch)
    assert made.image.startswith(b"\x7fELF")
    assert made.registers is not None, f"the log names no kernel {key.kernel}:\n{made.log}"
    assert COMPLAINT.search(made.log) is None, made.log
    if catalog.is_tuned(key, arch):
        assert made.spill_bytes == 0, made.log


def test_every_kernel_of_the_package_is_among_them() -> None:
    sources = Path(catalog.__file__).parent.glob("src/*.cu")
    assert {key.kernel for _, key in CASES} == {source.stem for source in sources}


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_compiled_ahead_of_time_is_among_them(arch: str) -> None:
    common = catalog.common_keys(arch, ["float16"], [64])
    assert common
    assert set(common) <= set(catalog.representative_keys(arch))


@pytest.mark.parametrize(
    ("line", "complains"),
    [
        ("ptxas info    : Used 40 registers, used 1 barriers", False),
        ("a.cuh(2): warning #177-D: variable was declared but never referenced", True),
        ("ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions", True),
    ],
)
def test_the_pattern_for_complaints(line: str, complains: bool) -> None:
    assert (COMPLAINT.search(line) is not None) is complains
