"""Bridges are tested on the NumPy backend, which has nothing to compile."""

import pytest


@pytest.fixture(autouse=True)
def _numpy_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEATTN_BACKEND", "numpy")
