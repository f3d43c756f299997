"""Every test, doctests included, leaves the registry of backends as it found it."""

from collections.abc import Iterator

import pytest

from tileattn import backends


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Take back what a test registers."""
    before = dict(backends._loaded)
    yield
    backends._loaded.clear()
    backends._loaded.update(before)
