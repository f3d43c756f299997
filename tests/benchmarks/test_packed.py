"""The benchmark of packed sequences; on NumPy arrays, with a clock that is made up."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import packed
from benchmarks.configurations import PASSES
from tests.benchmarks.fake_gpu import Fake
from tools import performance_tables


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make problems that NumPy computes at once."""
    for name, size in {"H": 2, "LONGEST": 16, "SHORT": 4, "EQUAL": (4, 8)}.items():
        monkeypatch.setattr(packed, name, size)


@pytest.mark.usefixtures("small")
def test_all_lengths_have_all_tokens() -> None:
    for tokens in (32, 64):
        cases = packed.lengths_of(tokens)
        assert all(sum(x.each) == tokens for x in cases)
        assert [len(set(x.each)) == 1 for x in cases] == [True, True, False, False]
        assert all(min(x.each) > 0 for x in cases)


@pytest.mark.usefixtures("small")
def test_equal_lengths_are_set_against_a_batch(tmp_path: Path) -> None:
    options = ["--head-dim", "8", "--tokens", "32", "--to", str(tmp_path)]
    packed.main(options, Fake())
    rows = json.loads((tmp_path / "gpu_packed.json").read_text(encoding="utf-8"))["rows"]
    assert [row["pass"] for row in rows] == [*PASSES] * 8
    assert {row["tokens"] for row in rows} == {32}
    assert {row["ms"] for row in rows} == {2}
    assert [row["of_batch"] for row in rows[::4]] == [1, 1, None, None]
    assert all("ModuleNotFoundError" in row["failed"] for row in rows)


@pytest.mark.usefixtures("small")
def test_results_of_a_peer_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    off = 0.0

    def theirs(given: packed.Packed, _longest: int, causal: bool) -> Any:
        forward, backward = packed.ours(given, causal)
        tokens_first = [x.swapaxes(0, 1) + off for x in (forward().out, *backward()[:3])]
        return [lambda: tokens_first[0], lambda: tuple(tokens_first[1:])]

    (lengths, *_) = packed.lengths_of(32)
    monkeypatch.setattr(packed, "fa4", theirs)
    forward, backward = packed.compared(lengths, 8, True, Fake())
    assert (forward["failed"], forward["speedup"], backward["fa4_ms"]) == (None, 1, 2)
    off = 0.5
    forward, _ = packed.compared(lengths, 8, True, Fake())
    assert forward["failed"].startswith("RuntimeError: the results differ by ")


def test_the_table_has_a_row_for_each_case() -> None:
    row = {"pass": "forward", "lengths": "32 of 512", "causal": True, "D": 64, "tokens": 16384}
    row |= {"sequences": 32, "ms": 0.5, "of_batch": 0.99, "fa4_ms": 0.6, "speedup": 1.2}
    lines = list(performance_tables._packed([row, row | {"of_batch": None}]))
    assert any("| 0.500 | 0.99 | 0.600 | 1.20 |" in line for line in lines)
    assert any("| 0.500 |  | 0.600 | 1.20 |" in line for line in lines)
