"""Fixtures of the tests of kernels: a compiler, and a disk cache of their own."""

from pathlib import Path

import pytest

from tests.kernels.cuda.jit import tiny_kernel
from tileattn.kernels import disk_cache as cache
from tools.sass import nvdisasm


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test a cache of its own, and every warning again."""
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path / "cache"))
    cache._warn_once.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def nvrtc(place: Path) -> Path:
    """Skip without a compiler; compile again, not into the user's cache."""
    tiny_kernel.need_compiler()
    return place


@pytest.fixture
def program(nvrtc: Path) -> str:  # noqa: ARG001 - without a compiler there is nothing to read
    """Path of the disassembler; without it, skip."""
    found = nvdisasm()
    if found is None:
        pytest.skip("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a small kernel."""
    return tiny_kernel.written(tmp_path / "src")
