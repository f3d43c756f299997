"""The tests themselves: every process finds the same ones, or workers beside each other stop."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


TESTS = """
import pytest

def test_quick(): ...
@pytest.mark.slow(always=True)
def test_always(): ...
@pytest.mark.slow
@pytest.mark.parametrize("n", range(20))
def test_slow(n): ...
@pytest.mark.slow("together")
def test_one(): ...
@pytest.mark.slow("together")
def test_other(): ...
"""


@pytest.mark.slow
def test_each_slow_test_has_one_turn(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "conftest.py").write_bytes((HERE.parent / "conftest.py").read_bytes())
    turns = []
    for n in range(2):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", f"--turn={n}/2"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        turns.append({line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line})
    quick = {"test_quick", "test_always"}
    assert turns[0] & turns[1] == quick
    together = {"test_one", "test_other"}
    assert turns[0] | turns[1] == quick | together | {f"test_slow[{n}]" for n in range(20)}
    assert any(together <= turn for turn in turns)
    assert all(len(turn) > 5 for turn in turns)
