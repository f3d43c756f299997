"""The benchmark of ranks that share a sequence; here ranks are threads."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import distributed
from tests.distributed.threads import Rank, World, on_ranks


def test_rank_0_writes_each_schedule_and_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    argv = ["--quick", "--seconds", "0", "--length", "40", "--heads", "3", "--to", str(tmp_path)]

    def run(comm: Any) -> None:
        distributed.main(argv, lambda: comm)

    assert on_ranks(2, run) == [None, None]
    result = json.loads((tmp_path / "distributed_cpu.json").read_text(encoding="utf-8"))
    assert result["machine"]["ranks"] == 2
    rows = {(x["pass"], x["causal"], x["schedule"], x["layout"]): x for x in result["rows"]}
    assert len(rows) == 2 * 2 * 6 * 2
    row = rows["both", True, "ring", "zigzag"]
    expected = row["one_rank_ms"] / row["ms"] / 2
    assert row["fraction_of_linear"] == pytest.approx(expected, rel=1e-2)
    assert rows["both", False, "auto", "contiguous"]["ms"] > 0
    assert "2 ranks do not form" in rows["forward", False, "heads-4", "zigzag"]["failed"]
    assert "k has 3 heads, and 2 ranks share" in rows["forward", False, "heads", "zigzag"]["failed"]


@pytest.mark.parametrize("comm", [None, Rank(World(1), 0)], ids=["none", "one"])
def test_one_rank_is_told_how_to_start_several(comm: Any) -> None:
    with pytest.raises(SystemExit, match=r"one rank, .* by `mpiexec -n 2 python -m tileattn bench"):
        distributed.main([], lambda: comm)
