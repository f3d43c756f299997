"""The benchmark of options; on NumPy arrays, with a clock that is made up."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import options
from benchmarks.configurations import PASSES
from tests.benchmarks.fake_gpu import Fake
from tools import performance_tables


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make problems that NumPy computes at once."""
    for name, size in {"B": 2, "H": 2, "N": 30, "D": 8, "WINDOW": 9, "DOCUMENT": 7}.items():
        monkeypatch.setattr(options, name, size)


@pytest.mark.usefixtures("small")
def test_each_option_is_set_against_the_call_without_one(tmp_path: Path) -> None:
    options.main(["--peers", "fa4", "--to", str(tmp_path)], Fake())
    rows = json.loads((tmp_path / "gpu_options.json").read_text(encoding="utf-8"))["rows"]
    names = list(options.options(np))
    assert [(row["option"], row["pass"]) for row in rows] == [(x, y) for x in names for y in PASSES]
    assert {(row["ms"], row["times_plain"], row["speedup"]) for row in rows} == {(2, 1, None)}
    failed = {
        row["option"] for row in rows if "ModuleNotFoundError" in row["failed"].get("fa4", "")
    }
    assert failed == {"plain", "softcap", "causal window"}


@pytest.mark.usefixtures("small")
def test_some_options_are_enough(tmp_path: Path) -> None:
    options.main(["--only", "mask,sinks", "--peers", "fa4", "--to", str(tmp_path)], Fake())
    rows = json.loads((tmp_path / "gpu_options.json").read_text(encoding="utf-8"))["rows"]
    assert list(dict.fromkeys(row["option"] for row in rows)) == ["plain", "mask", "sinks"]
    with pytest.raises(SystemExit):
        options.main(["--only", "masks"], Fake())


@pytest.mark.usefixtures("small")
def test_a_peer_is_timed_in_turns_and_wrong_results_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = [lambda: np.ones((2, 2, 30, 8)), lambda: (np.ones((2, 2, 30, 8)),) * 3]
    monkeypatch.setattr(options, "_calls", lambda *_: wrong)
    (forward, _) = options.compared("plain", options.Option({}), ["cudnn"], Fake())
    assert forward["failed"]["cudnn"].startswith("RuntimeError: the results differ by ")
    dropout = options.Option({"dropout_p": 0.1, "seed": 1})
    forward, backward = options.compared("dropout", dropout, ["cudnn"], Fake())
    assert forward["peers_ms"] == backward["peers_ms"] == {"cudnn": 2}
    assert forward["speedup"] == 1


def test_the_table_has_a_column_for_each_peer() -> None:
    row = {"pass": "forward", "option": "mask", "ms": 1.0, "times_plain": 1.25}
    rows = [row | {"peers_ms": {"cudnn": 1.5}, "speedup": 1.5}]
    rows += [row | {"option": "sinks", "peers_ms": {}, "speedup": None}]
    lines = list(performance_tables._options(rows))
    assert "| forward | mask | 1.000 | 1.25 | 1.500 | 1.50 |" in lines
    assert "| forward | sinks | 1.000 | 1.25 |  |  |" in lines
