"""Bridges are tested on the NumPy backend, which has nothing to compile."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _numpy_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEATTN_BACKEND", "numpy")


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    """Let Dynamo forget what it compiled before and in a test."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
