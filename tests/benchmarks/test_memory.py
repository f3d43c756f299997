"""Peaks of memory are those of the arrays, and what does not fit is refused before it is made."""

from typing import Any

import pytest

from benchmarks import memory
from benchmarks.configurations import Configuration
from benchmarks.memory import NAMES, Case
from benchmarks.report import Row

linux = pytest.mark.skipif(memory.unavailable() is not None, reason="peaks need Linux")


def case(
    name: str = "naive", kind: str = "forward", N: int = 100, device: str = "cpu", **other: Any
) -> Case:
    sizes: dict[str, Any] = {"dtype": "f32", "B": 1, "H": 2, "N": N, "D": 8}
    return Case(device, name, Configuration(kind, **sizes | other))


@pytest.mark.parametrize(
    ("one", "outputs", "beyond"),
    [
        (case(), 1, 4 * 2 * 100**2),
        (case(kind="both"), 4, 2 * 4 * 2 * 100**2),
        (case(kind="both", device="gpu"), 4, 3 * 4 * 2 * 100**2),
        (case("naive", "both", device="gpu", dtype="fp16"), 4, 4 * 2 * 2 * 100**2),
        (case("pytorch", device="gpu", dtype="fp16"), 1, 2 * 2 * 2 * 100**2),
        (case(B=3), 1, 3 * 4 * 2 * 100**2),
        (case("tileattn"), 1, 4 * 2 * 100),
        (case("tileattn", "both", dtype="f64"), 4, 8 * 2 * 100),
    ],
)
def test_what_a_case_needs_is_worked_out(one: Case, outputs: int, beyond: int) -> None:
    array = (
        one.configuration.B * 2 * 100 * 8 * {"f64": 8, "f32": 4, "fp16": 2}[one.configuration.dtype]
    )
    assert one.inputs == 4 * array
    assert one.needs == (4 + outputs) * array + beyond


def test_what_does_not_fit_or_takes_too_long_is_never_started() -> None:
    def peak(one: Case) -> Row:
        measured.append(one)
        if one.configuration.kind == "both":
            raise MemoryError("no room")
        return {"peak_bytes": 1, "seconds": 1e-4 * one.configuration.N**2}  # 1, 4, 64 seconds

    measured: list[Case] = []
    cases = [case(N=N) for N in (100, 200, 800, 1600)] + [case(kind="both"), case(N=50)]
    needs = cases[3].needs
    rows = list(memory.rows(cases, lambda: needs - 1, peak, 4.1))
    assert measured == [*cases[:2], *cases[4:]]
    assert rows[2]["not_run"] == "would take about 64 s, more than --limit-seconds 4.1"
    assert (rows[3]["needs_bytes"], rows[3]["free_bytes"]) == (needs, needs - 1)
    assert rows[3]["not_run"] == f"needs {needs / 1e9:.1f} GB and {needs / 1e9:.1f} GB are free"
    assert rows[4]["failed"] == "MemoryError: no room"
    assert all(rows[n]["peak_bytes"] == 1 for n in (0, 1, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_on_a_gpu_is_at_least_the_outputs(name: str) -> None:
    from benchmarks.device import Gpu

    one = case(name, device="gpu", N=1024, dtype="fp16", D=64)
    peak = memory.gpu_peak(Gpu(), one)["peak_bytes"]
    assert one.needs - one.inputs <= peak < 1.1 * (one.needs - one.inputs) + (1 << 20)
