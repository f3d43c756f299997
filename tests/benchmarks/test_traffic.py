"""The traffic section sets the model beside what is measured, or says what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest

import tileattn
from benchmarks import counters, gpu_tiles, memory, traffic
from benchmarks.configurations import Configuration, Inputs, random_blocks
from benchmarks.memory import Case
from benchmarks.report import Row
from tests.benchmarks.fake_gpu import Fake
from tileattn.kernels.cuda.families.tiles import TileSize

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


def test_what_does_not_fit_is_refused(small: Fake) -> None:
    (row,) = traffic.lengths([512], (32, 32), small, counts, NAMES)
    needs = Case("gpu", "naive", Configuration("both", **traffic.sizes_of(512))).needs
    assert needs > 1_000_000
    assert row["naive"]["needs_bytes"] == needs
    assert "not_run" in row["naive"]
    assert "ms" not in row["naive"]
    assert row["tileattn"]["dram_read_bytes"] == 512


def test_the_time_is_kept_where_nothing_is_counted(small: Fake) -> None:
    def refused(_: Case) -> Row:
        raise RuntimeError("ncu ended with status 1: ERR_NVGPUCTRPERM")

    (row,) = traffic.lengths([64], (32, 32), small, refused, NAMES)
    assert row["naive"]["ms"] == 2.0
    assert "ERR_NVGPUCTRPERM" in row["naive"]["not_counted"]
    (row,) = traffic.lengths([64], (32, 32), small, None, NAMES)
    assert row["naive"] == {"ms": 2.0}


def test_time_and_bytes_fall_with_the_density(small: Fake) -> None:
    rows = list(traffic.density(512, (128, 128), small, beside=False))
    forward = [row for row in rows if row["pass"] == "forward"]
    assert [row["density"] for row in forward] == [1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
    once = 2 * 512 * (8 * 2 * 2 + 4)  # q, out and lse
    keys = [row["modelled_bytes"] - once for row in forward]
    assert [n / keys[-1] for n in keys] == [row["density"] for row in forward]
    assert all(row["ms"] == 2.0 for row in rows)
    assert len(rows) == 12


def test_random_blocks_have_the_density_that_is_asked_for() -> None:
    assert random_blocks(1280, 0.1).density == 0.1
    assert random_blocks(1280, 1.0).density == 1.0
    assert random_blocks(1280, 0.101).density == 0.11


def test_bytes_fall_with_the_size_of_the_tiles() -> None:
    rows = [row for row in traffic.blocks(128, 0.0) if row["pass"] == "forward"]
    assert [row["tile"] for row in rows] == [64, 128]
    once = 8 * 128 * (2 * 64 * 4 + 4)  # q, out and lse
    assert rows[0]["modelled_bytes"] - once == 2 * (rows[1]["modelled_bytes"] - once)
    assert all(row["ms"] > 0 for row in rows)


def test_tiles_of_a_gpu_are_modelled_timed_and_counted(
    small: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[tuple[str, TileSize]] = []

    def prepare(kernel: str, tile: TileSize, inputs: Inputs) -> Any:
        assert inputs.q.shape == (2, 2, 64, 8)
        prepared.append((kernel, tile))
        return lambda: None

    monkeypatch.setattr(gpu_tiles, "prepared", prepare)
    rows = list(traffic.gpu_blocks(64, small, counts))
    assert prepared == [(name, tile) for name, tiles in gpu_tiles.TILES.items() for tile in tiles]
    assert [row["tile"] for row in rows] == [tile[:2] for _, tile in prepared]
    assert all(row["ms"] == 2.0 and row["dram_read_bytes"] == 64 for row in rows)
    moved = {row["tile"][0]: row["modelled_bytes"] for row in rows}
    once = 2 * 2 * 64 * (2 * 8 * 2 + 4)  # q, out and lse
    assert moved[16] - once == 2 * (moved[32] - once) == 4 * (moved[64] - once)


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
