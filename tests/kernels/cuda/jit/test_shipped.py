"""Kernels that the wheel brings: found by what they are made from, and checked before use."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.cuda.jit.tiny_kernel import HEADER, KEY, make
from tileattn.errors import BackendUnavailableError
from tileattn.kernels import disk_cache as cache
from tileattn.kernels.cuda.jit import compile as compiling
from tileattn.kernels.cuda.jit import load as loader
from tileattn.kernels.cuda.jit import shipped
from tileattn.kernels.cuda.jit.compile import Compiled, compiled

pytestmark = pytest.mark.usefixtures("place")

KEYS = [dataclasses.replace(KEY, head_dim=16 * n) for n in (1, 2, 3)]


@pytest.fixture
def made(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """Compile three kernels, ship them, and leave no compiler and no entry in the disk cache."""
    found = [make(folder, key) for key in KEYS]
    bodies = {kernel.inputs: kernel.body for kernel in found}
    assert shipped.write(tmp_path / "cubins", "sm_80", "NVRTC", bodies) < 60_000
    cache.clear()
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "cubins")
    monkeypatch.setattr(compiling, "_nvrtc", missing)
    shipped.index.cache_clear()
    shipped._warn_once.cache_clear()
    return found


def missing() -> Any:
    raise BackendUnavailableError("no NVRTC")


def test_a_shipped_kernel_needs_no_compiler(folder: Path, made: list[Compiled]) -> None:
    for key, first in zip(KEYS, made, strict=True):
        assert make(folder, key) == dataclasses.replace(first, cached=True)
    assert cache.entries() == []


def test_anything_else_is_compiled(folder: Path, made: list[Compiled]) -> None:
    assert made
    (folder / "other.cuh").write_text("// no kernel includes it")
    assert make(folder, KEYS[0]).cached
    asked: list[dict[str, Any]] = [
        {"key": dataclasses.replace(KEY, head_dim=64)},
        {"key": KEYS[0], "arch": "sm_86"},
        {"key": KEYS[0], "force": True},
    ]
    for call in asked:
        with pytest.raises(BackendUnavailableError, match="no NVRTC"):
            make(folder, **call)
    with pytest.raises(BackendUnavailableError, match="no NVRTC"):
        compiled(KEYS[0], "sm_80", (folder,), ship=False)
    (folder / "twice.cuh").write_text(HEADER.replace("2 * x", "3 * x"))
    with pytest.raises(BackendUnavailableError, match="no NVRTC"):
        make(folder, KEYS[0])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sm_80.bin", b""),
        ("sm_80.bin", bytes(40_000)),
        ("sm_80.json", b""),
        ("sm_80.json", b"{}"),
    ],
)
def test_a_damaged_file_is_told_once_and_ignored(
    folder: Path,
    made: list[Compiled],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes,
) -> None:
    (shipped.FOLDER / name).write_bytes(content)
    monkeypatch.undo()  # the compiler is there again
    monkeypatch.setattr(shipped, "FOLDER", folder.parent / "cubins")
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(folder.parent / "cache"))
    with pytest.warns(RuntimeWarning, match=f"{name} is damaged") as told:
        again = [make(folder, key) for key in KEYS]
    assert len(told) == 1
    assert [x.image for x in again] == [x.image for x in made]


def test_an_exchanged_kernel_is_not_loaded(folder: Path, made: list[Compiled]) -> None:
    bodies = {kernel.inputs: kernel.body for kernel in made}
    other = {kernel.inputs: kernel.body[::-1] for kernel in made}
    index = (shipped.FOLDER / "sm_80.json").read_bytes()
    shipped.write(shipped.FOLDER, "sm_80", "NVRTC", bodies | other)
    (shipped.FOLDER / "sm_80.json").write_bytes(index)
    with (
        pytest.warns(RuntimeWarning, match="is damaged"),
        pytest.raises(BackendUnavailableError, match="no NVRTC"),
    ):
        make(folder, KEYS[0])


def test_a_driver_that_refuses_a_shipped_kernel_gets_a_compiled_one(
    folder: Path, made: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def given(key: Any, arch: str, folders: Any, *, ship: bool = True) -> Compiled:
        assert (key, arch, folders) == (KEYS[0], "sm_80", (folder,))
        return dataclasses.replace(made[0], cached=ship)

    def place(key: Any, arch: str, found: Compiled, device: int) -> Any:
        asked.append((key, arch, device, found.cached))
        if found.cached:
            raise BackendUnavailableError("the driver rejects it")
        return "a kernel"

    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(loader, "compiled", given)
    monkeypatch.setattr(loader, "_placed", place)
    found: Any = loader.load(KEYS[0], 0, "sm_80", (folder,))
    assert found == "a kernel"
    assert asked == [(KEYS[0], "sm_80", 0, True), (KEYS[0], "sm_80", 0, False)]
