"""The support table of docs/backends.md says what the backends say."""

import subprocess
import sys
from pathlib import Path

import pytest

from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.problem import Options, Problem
from tools import support_table
from tools.support_table import BEGIN, END, representative, table, updated

ROOT = Path(__file__).parents[1]


class Short(NumpyBackend):
    """Serves up to 100 keys, without softcap."""

    name = "short"

    def why_not(self, problem: Problem) -> str | None:
        if problem.softcap is not None:
            return "it has no softcap"
        return "there are more than 100 keys" if problem.Nk > 100 else None


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the tool in a process of its own, which knows the built-in backends only."""
    return subprocess.run(
        [sys.executable, "-m", "tools.support_table", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_table_in_the_page_is_up_to_date() -> None:
    done = run("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_page_is_found_and_mended(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{BEGIN}\n| old |\n{END}\n\nafter\n", encoding="utf-8")
    stale = run("--check", "--page", str(page))
    assert stale.returncode == 1
    assert "page.md is stale" in stale.stdout
    assert run("--write", "--page", str(page)).returncode == 0
    assert run("--check", "--page", str(page)).returncode == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| old |" not in text


def test_a_refusal_is_numbered_and_its_reason_stands_below() -> None:
    lines = list(table([NumpyBackend(), Short()], representative()))
    assert lines[0] == "| | `numpy` | `short` |"
    assert "| float32 | yes | yes |" in lines
    assert "| one query, many keys | yes | no (1) |" in lines
    assert "| `softcap` | yes | no (2) |" in lines
    assert "| several options together | yes | no (2) |" in lines
    assert lines[-3:] == ["", "1. there are more than 100 keys", "2. it has no softcap"]


def test_every_option_has_a_row() -> None:
    used = frozenset().union(*(problem.uses for problem in representative().values()))
    assert used == set(Options.__annotations__) - {"scale"}  # any finite number: nothing to refuse


@pytest.mark.parametrize(
    "page", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}", f"{BEGIN}{END}{END}"]
)
def test_a_page_without_its_two_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="must have one line"):
        updated(page, [])


def test_the_page_that_is_written_is_the_one_in_docs() -> None:
    assert ROOT / "docs" / "backends.md" == support_table.PAGE
