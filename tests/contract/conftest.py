"""The contract suite runs with memory that holds NaN until it is written."""

import pytest

from tests.poison import on_host


@pytest.fixture(autouse=True)
def memory_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what backends allocate on the host; ``--poison`` fills a GPU's memory, too."""
    on_host(monkeypatch)
