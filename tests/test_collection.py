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
