"""Every test, doctests included, leaves the process as it found it."""

import gc
import hashlib
import tracemalloc
from collections.abc import Iterator

import pytest

from tileattn.backends import registry


@pytest.fixture(autouse=True)
def restored_registry() -> Iterator[None]:
    """Take back what a test registers."""
    before = dict(registry._loaded)
    yield
    registry._loaded.clear()
    registry._loaded.update(before)


@pytest.fixture(autouse=True)
def untraced_memory() -> Iterator[None]:
    """Fail a test that leaves tracemalloc on: later tests would take ten times as long."""
    yield
    assert not tracemalloc.is_tracing()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--shard``, which ``tools/gpu_tests.py`` gives, ``--turn`` and ``--poison``."""
    parser.addoption("--shard", metavar="I/N", help="run the I-th of N shares, from 0 on")
    parser.addoption(
        "--turn",
        metavar="I/N",
        help="run the quick tests, and the I-th of N shares of the slow ones, from 0 on",
    )
    parser.addoption(
        "--poison",
        action="store_true",
        help="fill memory that is allocated with NaN (tests/poison.py)",
    )


def pytest_sessionstart() -> None:
    """Collect no garbage before the first test: it would take a quarter of that time."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make garbage collections few and short, and fill memory from the first test on.

    A collection of all that is loaded by now takes half a second: of PyTorch, JAX and 12,000 tests.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    if session.config.getoption("poison", False):  # absent from `pytest --pyargs`
        from tests import poison

        poison.install(pytest.MonkeyPatch())


# --- shares of the tests --------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other shares.

    The tests of a file are shuffled, in the same way in all shares. Neighbouring tests need the
    same kernels, and processes would wait for one another to compile them.
    """
    if config.getoption("turn", None):
        turn, turns = map(int, config.getoption("turn").split("/"))
        if not 0 <= turn < turns:
            raise pytest.UsageError(f"--turn must be I/N with 0 <= I < N, not {turn}/{turns}")
        others = [x for x in items if _turn_of(x, turns) not in (None, turn)]
        config.hook.pytest_deselected(items=others)
        items[:] = [x for x in items if _turn_of(x, turns) in (None, turn)]
    if not config.getoption("shard", None):
        return
    share, count = map(int, config.getoption("shard").split("/"))
    items.sort(key=lambda item: (item.path, hashlib.sha256(item.nodeid.encode()).digest()))
    config.hook.pytest_deselected(items=[x for n, x in enumerate(items) if n % count != share])
    items[:] = items[share::count]


def _turn_of(item: pytest.Item, turns: int) -> int | None:
    """Return the share of a slow test; None for a quick one, which belongs to all.

    Slow tests whose marks have the same argument have the same share.
    """
    mark = item.get_closest_marker("slow")
    if mark is None:
        return None
    return hashlib.sha256(repr(mark.args or item.nodeid).encode()).digest()[0] % turns
