"""The benchmark of decoding; on NumPy arrays, with a clock that is made up."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import decode
from benchmarks.decode import Decoding, Given
from tests.benchmarks.fake_gpu import Fake
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound
from tools import performance_tables

SMALL = [
    Decoding("equal", 4, 2, [24] * 3),
    Decoding("drafts", 4, 2, [24] * 3, Nq=4),
    Decoding("lengths", 4, 2, [5, 24, 17]),
    Decoding("pages", 4, 2, [24] * 3, page=5),
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "cases", lambda: SMALL)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_ours_attends_to_the_cache_of_each_sequence(case: Decoding) -> None:
    x = Given.of(np, case, 8, 0)
    k, v = x.k, x.v
    if x.table is not None:
        k, v = (np.concatenate(np.moveaxis(y[x.table], 1, 0), axis=2) for y in (k, v))
    options: dict[str, Any] = {"kv_lengths": case.lengths, "causal": True}
    out = decode.ours(case, x)()
    expected = reference.forward(x.q, k, v, **options)
    bounds = error_bound(x.q, k, v, **options)
    assert_attention_close(expected._replace(out=out), expected, bounds, names=("out",))


@pytest.mark.usefixtures("small")
def test_rates_are_of_the_keys_that_there_are(tmp_path: Path) -> None:
    decode.main(["--head-dim", "8", "--to", str(tmp_path)], Fake())
    rows = json.loads((tmp_path / "gpu_decode.json").read_text(encoding="utf-8"))["rows"]
    assert [row["case"] for row in rows] == [case.name for case in SMALL]
    for row, case in zip(rows, SMALL, strict=True):
        keys = sum(case.lengths)
        assert row["keys"] == keys
        assert row["us"] == 2000
        assert row["gbytes_per_second"] == pytest.approx(keys * 2 * 2 * 8 * 2 / 2e-3 / 1e9)
        assert "ModuleNotFoundError" in row["failed"]["fa4"]
        assert ("cudnn" in row["failed"]) == (case.name == "equal")


@pytest.mark.usefixtures("small")
def test_results_of_a_peer_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def peer(off: float) -> Any:
        return lambda case, x: lambda: decode.ours(case, x)() + np.float32(off)

    monkeypatch.setattr(decode, "replayed", lambda call: call)
    monkeypatch.setattr(
        decode, "PEERS", {"near": peer(0), "far": peer(0.5), "none": lambda *_: None}
    )
    row = decode.compared(SMALL[0], 8, ["near", "far", "none"], Fake())
    assert row["peers_us"] == {"near": 2000}
    assert row["speedup"] == 1
    assert list(row["failed"]) == ["far"]
    assert row["failed"]["far"].startswith("RuntimeError: the results differ by ")


def test_an_unknown_case_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode.main(["--only", "9 of 9"], Fake())
    assert "--only has 9 of 9, which is none of: 1 of 4,096;" in capsys.readouterr().err


def test_the_table_has_a_row_for_each_case() -> None:
    row = {"case": "1 of 4,096", "D": 128, "Hq": 32, "Hkv": 8, "us": 10.0, "speedup": 1.2}
    row |= {"gbytes_per_second": 3000.0, "peers_us": {"cudnn": 12.0}}
    lines = list(performance_tables._decode([row, row | {"peers_us": {}, "speedup": None}]))
    assert any("| 10.0 | 3000 | 12.0 | 1.20 |" in line for line in lines)
    assert any("| 10.0 | 3000 |  |  |" in line for line in lines)
