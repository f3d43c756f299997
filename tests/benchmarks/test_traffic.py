"""The traffic section sets the model beside what is measured, or says what is missing."""

import json
from pathlib import Path

import pytest

import tileattn
from benchmarks import counters, memory, traffic
from benchmarks.memory import Case
from benchmarks.report import Row
from tests.benchmarks.fake_gpu import Fake

NAMES = ("naive", "tileattn")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Sizes that NumPy computes at once, on a device with room for a megabyte."""
    monkeypatch.setattr(traffic, "TOKENS", 128)
    monkeypatch.setattr(traffic, "HEADS", 2)
    monkeypatch.setattr(traffic, "HEAD_DIM", 8)
    monkeypatch.setattr(memory, "gpu_free", lambda _: 1_000_000)
    return Fake()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave neither a GPU nor ncu."""
    monkeypatch.setattr(tileattn, "available_backends", lambda: {"cupy": "there is no device"})
    monkeypatch.setattr(counters, "find_ncu", lambda: None)


def counts(case: Case) -> Row:
    return {"dram_read_bytes": case.configuration.N}


def test_both_passes_are_modelled_together() -> None:
    row = traffic.model({"dtype": "fp16", "B": 2, "H": 3, "N": 256, "D": 8}, (64, 64))
    queries, wide = 2 * 3 * 256, 2 * 3 * 256 * 8  # rows of an array, and its elements
    moved = row["modelled_bytes"]
    assert moved["standard"] == 2 * (12 * wide + 11 * queries * 256)  # matrices of scores
    parts = [
        2 * 2 * wide + 4 * queries,  # q, out and lse
        4 * 2 * 2 * wide,  # k and v for each of 4 blocks of queries
        2 * 2 * wide + 4 * queries + 4 * wide,  # delta from out and dout, and dq as zeros
        4 * 2 * wide,  # k, v, dk and dv
        4 * (2 * 2 * wide + 2 * 4 * queries + 2 * 4 * wide),  # q, dout, lse, delta and dq
    ]
    assert moved["flash2"] == sum(parts)
    assert moved["standard"] > moved["flash1"] > moved["flash2"]
    product = 2 * 2 * 3 * 256 * 256 * 8 / 1e9
    assert row["gflop"] == {"standard": 6 * product, "flash1": 7 * product, "flash2": 7 * product}


def test_lengths_are_measured_where_there_is_a_device(small: Fake) -> None:
    (row,) = traffic.lengths([64], (32, 32), small, counts, NAMES)
    assert (row["B"], row["H"], row["N"], row["tile"]) == (2, 2, 64, [32, 32])
    for name in ("naive", "tileattn"):
        assert row[name] == {"ms": 2.0, "dram_read_bytes": 64}
    assert "paper" not in row


@pytest.mark.usefixtures("alone")
def test_without_a_gpu_the_model_is_written_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traffic.main(["--length", "1024", "--to", str(tmp_path)])
    result = json.loads((tmp_path / "traffic.json").read_text(encoding="utf-8"))
    assert {"GPU", "ncu"} <= set(result["missing"])
    (row,) = result["rows"]
    assert set(row["modelled_bytes"]) == {"standard", "flash1", "flash2"}
    assert "naive" not in row
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "GPU is missing: there is no device; the model is shown"
    assert lines[1].startswith("ncu is missing: ")
    assert lines[1].endswith("; the model is shown")
