"""The results files with comparisons are all read, in their earlier and their present form."""

from fnmatch import fnmatchcase
from typing import Any

import pytest

from benchmarks.report import RESULTS, load
from tools import results, verdicts
from tools.comparisons import SOURCES, WITHOUT, Comparison, comparisons, label
from tools.performance_tables import slower

GPU = {"gpu": "A GPU", "date": "today", "commit": "1", "peers": {"fa3": "3.0"}}
CPU = {"processor": "A CPU", "threads": 2, "date": "today", "commit": "1"}


def compared(name: str, *rows: dict[str, Any], machine: dict[str, Any] = GPU) -> list[Comparison]:
    return list(comparisons({name: {"machine": machine, "rows": list(rows)}}))


def timed(us: float, spread: float = 0.0, **us_of_others: float) -> dict[str, Any]:
    """A row of a benchmark with these times."""
    return {
        **{"pass": "forward", "dtype": "bf16", "B": 2, "H": 8, "N": 100, "D": 64},
        "us": {"tileattn": us, **us_of_others},
        "speedup_over": {name: time / us for name, time in us_of_others.items()},
        "spread": dict.fromkeys(("tileattn", *us_of_others), spread),
        "mismatch": {},
        "failed": {},
    }


@pytest.mark.parametrize("name", [path.stem for path in sorted(RESULTS.glob("*.json"))])
def test_each_results_file_is_read_or_has_no_comparisons(name: str) -> None:
    patterns = [pattern for pattern in (*SOURCES, *WITHOUT) if fnmatchcase(name, pattern)]
    assert len(patterns) == 1, "name it in SOURCES or in WITHOUT of tools/comparisons.py"
    if patterns[0] in SOURCES:
        found = list(comparisons({name: results.read()[name]}))
        assert found
        assert all(label(one.call) for one in found)


def test_the_fastest_of_all_baselines_counts() -> None:
    (one,) = compared("gpu_models", timed(10, cudnn=12, fa3=9, fa4=30) | {"case": "a model"})
    assert (one.fastest, one.speed, one.is_slower) == ("fa3", 0.9, True)
    assert one.us == {"ours": 10, "cudnn": 12, "fa3": 9, "fa4": 30}
    assert label(one.call) == "forward, a model, bf16, B = 2, H = 8, N = 100, D = 64"


def test_each_way_to_call_tileattn_is_compared_with_the_other_libraries() -> None:
    loop = {
        "section": "loops",
        "loop": "new length",
        "us": {"torch": 20.0, "llvm": 5.0, "SDPA": 10.0},
    }
    torch, llvm = compared("lived_cpu", loop | {"host_us": {}}, machine=CPU)
    assert torch.what == "Loops, `tileattn.torch`, A CPU, 2 threads"
    assert (torch.speeds, llvm.speeds) == ({"SDPA": 0.5}, {"SDPA": 2.0})
    assert torch.us == {"ours": 20.0, "SDPA": 10.0}


def test_rates_and_ranks_become_speeds() -> None:
    row = timed(1) | {"section": "grid", "dtype": "f32"}
    rates = {"llvm": 40.0, "torch": 50.0, "numpy": 20.0}
    llvm, numpy = compared("cpu_a", row | {"gflops": rates}, machine=CPU)
    assert llvm.speeds == pytest.approx({"torch": 0.8, "numpy": 2})
    assert numpy.speeds == pytest.approx({"torch": 0.4})
    flops = 4 * 2 * 8 * 100**2 * 64
    assert llvm.us["ours"] == pytest.approx(flops / 40e9 * 1e6)
    (ranks,) = compared("distributed_gpu", {"pass": "both", "ms": 5.0, "one_gpu_ms": 4.0})
    assert ranks.speeds == {"one GPU": 0.8}


def test_earlier_rows_have_todays_form() -> None:
    read = results.read()
    for name in results.EARLIER:
        for row in read[name]["rows"]:
            own = row["us"]["tileattn"]
            for other, speedup in row["speedup_over"].items():
                assert speedup == pytest.approx(row["us"][other] / own, rel=1e-3)
    old, new = load(RESULTS, "gpu_f64"), read["gpu_f64"]
    if isinstance(old["machine"].get("cudnn"), int):
        assert new["machine"]["peers"] == {"cudnn": "9.19.0"}


def test_every_slower_call_is_in_a_table() -> None:
    rows = [timed(us, fa3=10.0) | {"case": f"model {us}"} for us in (8.0, 10.04, 10.2, 12.5)]
    lines = "\n".join(slower.lines(compared("gpu_models", *rows)))
    assert "slower in 2 of 4 calls; in 2 of them" in lines
    assert '??? note "Models: slower in 2 of 4 calls, down to 0.80"' in lines
    assert "| FlashAttention-3 | 0.98 | 10.2 | 10 | slower |" in lines
    assert "| FlashAttention-3 | 0.8 | 12.5 | 10 | slower |" in lines
    assert "model 8.0" not in lines


# --- the same call in two tables ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed", "spread", "expected"),
    [
        (1.02, 0.0, "faster"),
        (1.005, 0.0, "equal"),
        (0.98, 0.0, "slower"),
        (1.02, 0.05, "equal"),
        (0.9, 0.2, "equal"),
    ],
)
def test_a_verdict_counts_the_spread(speed: float, spread: float, expected: str) -> None:
    (one,) = compared("gpu_models", timed(1, spread, fa4=speed))
    assert verdicts.verdict(one, "fa4") == expected


def two_tables(first: float, second: float, **changed: Any) -> list[str]:
    """Find contradictions between the grid and the options in one call's speed."""
    grid = compared("gpu_forward_bf16", timed(100, fa4=100 * first))
    option = timed(10, fa4=10 * second, cudnn=5.0) | {"option": "plain"} | changed
    return [str(x) for x in verdicts.contradictions([*grid, *compared("gpu_options", option)])]


def test_a_call_with_two_verdicts_names_both_files() -> None:
    assert two_tables(1.08, 0.95) == [
        "forward, bf16, B = 2, H = 8, N = 100, D = 64, beside FlashAttention-4: "
        "1.08 in `gpu_forward_bf16`, 0.95 in `gpu_options`"
    ]
    assert two_tables(1.08, 1.5) == []  # faster in both
    assert two_tables(1.015, 1.005) == []  # faster and equal, with ranges that overlap
    assert len(two_tables(1.2, 1.0)) == 1


@pytest.mark.parametrize(
    "changed", [{"option": "softcap"}, {"Hkv": 2}, {"Dv": 32}, {"causal": True}, {"dtype": "fp16"}]
)
def test_another_call_may_have_another_verdict(changed: dict[str, Any]) -> None:
    assert two_tables(1.08, 0.95, **changed) == []


def test_a_window_and_a_cache_are_recognised() -> None:
    sizes = {"causal": True, "N": 4096}
    grid = compared("gpu_shapes", timed(1, fa4=2) | sizes | {"window": 1024})
    model = compared("gpu_models", timed(1, fa4=0.5) | sizes | {"options": "window (1023, 0)"})
    assert len(list(verdicts.contradictions([*grid, *model]))) == 1
    cache = {"case": "2 of 50", "Hq": 8, "Hkv": 4, "Nq": 1, "keys": 100}
    row = {n: x for n, x in timed(1, fa4=2).items() if n not in ("pass", "H", "N")}
    decode = compared("gpu_decode", row | cache)
    model = compared("gpu_models", timed(1, fa4=0.5) | {"Hkv": 4, "N": 1, "Nk": 50})
    assert len(list(verdicts.contradictions([*decode, *model]))) == 1
