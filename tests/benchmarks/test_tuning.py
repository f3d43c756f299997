"""The benchmark of tuned numbers finds the calls that each one changes, without a GPU."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from benchmarks import tuning
from benchmarks.configurations import DTYPES, Configuration, Inputs
from benchmarks.tuning import NUMBERS, Case
from tests.backends.cupy.fake_cupy import machine
from tests.benchmarks.fake_gpu import Fake
from tileattn.kernels.cuda.plan.device import device_of_arch

STAGGERED = [
    Case(Configuration("backward", "bf16", 64, 16, N, 128, causal=True), deterministic)
    for N in (256, 512, 1024)
    for deterministic in (False, True)
]


OF_OLDER_GPUS = ("generic_plane_rows",)  # Hopper computes these calls with other kernels


@pytest.fixture(scope="module")
def in_any_order() -> Iterator[None]:
    """Shuffle the calls: those that a number changes are neighbours, and one of them is enough."""
    calls = tuning.cases()
    Random(0).shuffle(calls)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "cases", lambda: calls)
        tuning.problems.cache_clear()
        tuning.plans.cache_clear()
        yield
    tuning.problems.cache_clear()
    tuning.plans.cache_clear()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave only some calls of the backward pass."""
    tuning.problems.cache_clear()
    tuning.plans.cache_clear()
    monkeypatch.setattr(tuning, "cases", lambda: STAGGERED)
    yield
    tuning.problems.cache_clear()
    tuning.plans.cache_clear()


def test_every_number_is_listed_with_its_origin(capsys: pytest.CaptureFixture[str]) -> None:
    tuning.main([])
    listed = capsys.readouterr().out
    for name, number in NUMBERS.items():
        facts = f"{name} = {number.value}  [{number.unit}]  {number.condition}\n"
        assert facts + f"    {number.source.gpu}; " in listed


@pytest.mark.slow
@pytest.mark.usefixtures("in_any_order")
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_changes_a_call(name: str) -> None:
    number = NUMBERS[name]
    device = device_of_arch("sm_80" if name in OF_OLDER_GPUS else "sm_90a")
    assert next(tuning.changed(number, number.alternative, device), None) is not None


SMALL = [
    ("stagger_one_wave", Case(Configuration("backward", "bf16", 1, 70, 256, 96, True), True)),
    ("modified_rows", Case(Configuration("backward", "bf16", 1, 2, 512, 64), option="softcap")),
    ("masked_rows", Case(Configuration("forward", "bf16", 1, 2, 512, 64), option="documents")),
    ("split_queries", Case(Configuration("forward", "bf16", 1, 2, 9000, 64, Hkv=1), queries=1)),
    (
        "latent_keys_per_row",
        Case(
            Configuration("forward", "bf16", 1, 16, 3000, 576, Hkv=1, Dv=512),
            queries=1,
            latent=True,
        ),
    ),
]


@pytest.mark.parametrize(("name", "case"), SMALL, ids=[name for name, _ in SMALL])
def test_both_values_are_launched(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    number, device, launched = NUMBERS[name], Fake(), []
    device.xp = cupy
    with machine(monkeypatch) as gpu:
        gpu.arch = "sm_90a"
        drawn = Inputs(*(gpu.array(x, DTYPES[case.configuration.dtype]) for x in case.shapes))
        monkeypatch.setattr(device, "inputs", lambda *_: (drawn,))
        for value in (number.value, number.alternative):
            call = tuning.prepared(case, number, value, device)
            gpu.launches.clear()
            call()
            launched.append([x[:3] for x in gpu.launches])
    assert all(launched)
    mine, theirs = launched
    assert (mine != theirs) == (name != "stagger_one_wave")  # which changes only parameters


@pytest.mark.usefixtures("few")
def test_the_cost_of_another_value_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "prepared", lambda *_: lambda: None)
    monkeypatch.setattr(Fake, "time_each", lambda *_: [[0.002] * 3, [0.003] * 3])
    argv = ["--constant", "stagger_one_wave", "--value", "0", "1024", "--to", str(tmp_path)]
    tuning.main(argv, Fake())
    assert "0 changes 2 calls; timed are" in capsys.readouterr().out
    result = json.loads((tmp_path / "tuning_stagger_one_wave.json").read_text(encoding="utf-8"))
    costs = {(x["other"], x["N"]): x["cost_percent"] for x in result["rows"]}
    assert costs == pytest.approx({(0, 256): 50, (0, 512): 50, (1024, 1024): 50})
    assert all(row["deterministic"] for row in result["rows"])
