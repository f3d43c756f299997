"""The tests themselves: every process finds the same ones, or workers beside each other stop."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import conftest

HERE = Path(__file__).parent


def collected(seed: int) -> list[str]:
    """List the names of tests on a GPU as a process with this seed for hashes gives them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "gpu"]
    environment = os.environ | {"PYTHONHASHSEED": str(seed)}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in ("backends", "benchmarks", "contract", "gpu"))],
        cwd=HERE.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_names_do_not_depend_on_the_order_of_sets() -> None:
    # Workers have seeds of their own, and pytest-xdist compares the other tests that they find.
    first, second = (collected(seed) for seed in (1, 2))
    assert len(first) > 1000
    assert first == second


def taken(turn: str) -> set[str]:
    """Name the tests that a turn runs."""
    marks = {
        "quick": None,
        **{f"slow {n}": pytest.mark.slow for n in range(20)},
        **dict.fromkeys(("one", "other"), pytest.mark.slow("together")),
    }
    items: list[Any] = [
        SimpleNamespace(nodeid=name, get_closest_marker=lambda _, mark=mark: mark and mark.mark)
        for name, mark in marks.items()
    ]
    hook = SimpleNamespace(pytest_deselected=lambda **_: None)
    config: Any = SimpleNamespace(getoption=lambda name, *_: {"turn": turn}.get(name), hook=hook)
    conftest.pytest_collection_modifyitems(config, items)
    return {item.nodeid for item in items}


def test_each_slow_test_has_one_turn() -> None:
    first, second = (taken(f"{n}/2") for n in range(2))
    assert first & second == {"quick"}
    assert first | second == {"quick", "one", "other"} | {f"slow {n}" for n in range(20)}
    assert {"one", "other"} <= first or {"one", "other"} <= second
    assert min(len(first), len(second)) > 5
