"""The verb ``compile`` of the command line, and what ``info`` says of compiling."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tileattn.kernels.cuda.plan
from tests.kernels.cuda.jit import tiny_kernel
from tileattn.cli.commands import main
from tileattn.errors import BackendUnavailableError
from tileattn.kernels import disk_cache as cache
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit import compile as compiling


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own, and every warning again."""
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path / "cache"))
    cache._warn_once.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a small kernel."""
    return tiny_kernel.written(tmp_path / "src")


@pytest.fixture
def select(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer the small kernel, once for each type and head dimension."""

    def common_keys(_: str, dtypes: list[str], head_dims: list[int]) -> list[KernelKey]:
        return [KernelKey("tiny", dtype, D, D) for dtype in dtypes for D in head_dims]

    stub = ModuleType("tileattn.kernels.cuda.plan.catalog")
    stub.__dict__["common_keys"] = common_keys
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(tileattn.kernels.cuda.plan, "catalog", stub, raising=False)
    monkeypatch.setattr(compiling.compiled, "__defaults__", ((folder,),))


COMPILE = ["compile", "--arch", "sm_80", "compute_75", "--dtype", "float16", "float64"]


@pytest.mark.usefixtures("select")
def test_the_command_fills_the_cache(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    command = [*COMPILE, "--head-dim", "32", "64", "128"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    rows = out.splitlines()
    assert rows[0].split() == ["arch", "seconds", "registers", "spilled", "kernel"]
    assert len(rows) == 1 + 12 + 1
    assert re.fullmatch(r"sm_80 +\d+\.\d\d +\d+ +0  tiny float16 head_dim=32 value_dim=32", rows[1])
    assert rows[-1] == f"12 of 12 kernels are in {place}, or came with tileattn"
    assert not err  # so few are done before there is progress to tell
    assert len(cache.entries()) == 12
    assert main(command) == 0
    assert capsys.readouterr().out.count("cached") == 12
    assert main([*command, "--force", "--jobs", "1"]) == 0
    assert "cached" not in capsys.readouterr().out


@pytest.mark.usefixtures("select")
def test_the_command_reports_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "sm_80", "--dtype", "float16", "--head-dim", "64", "7"]) == 1
    out, err = capsys.readouterr()
    assert "columns come in sixteens" in err
    assert "1 of 2 kernels" in out
    assert main(["compile", "--arch", "sm_80", "sm_1"]) == 2
    assert capsys.readouterr().err.endswith("; got 'sm_1'\n")


@pytest.mark.usefixtures("select")
def test_the_command_needs_a_folder(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    place.write_text("not a folder")
    assert main(COMPILE) == 2
    assert "TILEATTN_CACHE_DIR" in capsys.readouterr().err


def test_the_command_needs_an_arch_or_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: int) -> str:
        raise BackendUnavailableError("the GPU cannot be used")

    monkeypatch.setattr("tileattn.cli.compile.arch_of", none)
    assert main(["compile"]) == 2
    assert "--arch sm_90a" in capsys.readouterr().err


def test_the_command_clears_the_cache(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    cache.write("cuda-" + "ab" * 32, b"kernel")
    (place / "notes.txt").write_text("keep")
    assert main(["compile", "--clear"]) == 0
    said = capsys.readouterr().out
    assert said == f"removed 1 file, 0.0 MiB from {place} (CUDA: 1 file, 0.0 MiB)\n"
    assert [path.name for path in place.iterdir()] == ["notes.txt"]


def test_info_shows_the_cache(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    cache.write("llvm-" + "ab" * 32, bytes(2**20))
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert re.search(
        rf"kernel cache +{re.escape(str(place))}, 1 file, 1\.0 MiB of at most 1,024 MiB", out
    )
    assert re.search(
        r"NVRTC +(\d+\.\d+, compiles for sm_|CuPy (is not installed|finds no NVRTC))", out
    )
