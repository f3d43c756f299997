"""One disk cache for all tests of the sources, so that they share compiled kernels."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the tests of one run share a cache, also between processes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(folder / "cache"))
    return folder / "cache"
