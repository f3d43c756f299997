"""The contract suite that other packages run: what breaks the contract fails it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tileattn.call.problem import Operands, Problem
from tileattn.results import Attention
from tileattn.testing.template import TemplateBackend

ROOT = Path(__file__).parents[2]


class Ignoring(TemplateBackend):
    """A backend that ignores the options that it does not know."""

    name = "ignoring"

    def why_not(self, _: Problem) -> None:
        return None


class Inexact(TemplateBackend):
    """A backend whose results are off by 1e-5."""

    name = "inexact"

    def forward(self, problem: Problem, operands: Operands, out: Any) -> Attention:
        found, lse = super().forward(problem, operands, out)
        found *= found.dtype.type(1 + 1e-5)
        return Attention(found, lse)


class Lists(TemplateBackend):
    """A backend that takes anything."""

    name = "lists"

    def owns(self, _: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("backend", "test"),
    [
        (Ignoring, "test_an_option_is_honoured_or_refused[softcap]"),
        (Inexact, "test_a_plain_call[float32]"),
        (Lists, "test_it_has_the_members_of_a_backend"),
        (None, ""),
    ],
)
def test_what_breaks_the_contract_fails(backend: Any, test: str, tmp_path: Path) -> None:
    """Run the suite as another package does, in a folder without configuration."""
    name = "" if backend is None else f"{__name__}:{backend.__name__}"
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs"]
    done = subprocess.run(
        [*line, f"tileattn.testing.test_contract{'::' * bool(test)}{test}"],
        env=os.environ | {"TILEATTN_TEST_BACKEND": name, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if backend is None else 1), done.stdout + done.stderr
    assert ("1 failed" in done.stdout) == (backend is not None)
