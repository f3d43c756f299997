"""Every tuned number says where it comes from, and calls can be planned with another value."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.cuda.plan.planning import H200, asked, backward, forward
from tileattn.kernels.cuda.families.size_class import shared_rows
from tileattn.kernels.cuda.tuning import TunedNumber, tuned_numbers

ROOT = Path(__file__).parents[3]
CALLS = [
    asked("bfloat16", B=2, Hq=16, Hkv=4, Nq=n, Nk=n, D=dim, Dv=dim, window=window)
    for n, dim in ((5000, 64), (512, 128), (2000, 256))
    for window in ((None, None), (None, 0), (700, 0))
]
DECODE = asked("bfloat16", B=2, Hq=64, Hkv=1, Nq=1, Nk=9000, D=128, Dv=128)


def test_sources_exist() -> None:
    docs = (ROOT / "docs/tuning-log.md").read_text(encoding="utf-8")
    for number in tuned_numbers():
        assert all((number.unit, number.condition, *number.source))
        file, _, words = number.source.text.partition(": ")
        if file == "docs/tuning-log.md":
            assert words in docs, number.name
        elif not file.startswith("measured "):
            assert (ROOT / file).exists(), number.name


def test_rows_of_the_split_kernel_for_hopper_are_a_class() -> None:
    """Kernels know shared rows only rounded up to a class."""
    rows = H200.tuning.split_wgmma_rows
    assert shared_rows(asked("float16", B=1, Hq=rows, Hkv=1, Nq=1, Nk=64, D=64, Dv=64)) == rows


@pytest.mark.parametrize("number", tuned_numbers(), ids=lambda number: number.name)
def test_calls_can_be_planned_with_another_value(number: TunedNumber) -> None:
    assert number.value != number.alternative
    tuning = replace(H200.tuning, **{number.name: number.alternative})
    device = replace(H200, tuning=tuning)
    for problem in (*CALLS, DECODE):
        plan = forward(problem, device)
        assert all(launch.shared_bytes <= device.shared_limit for launch in plan.launches)
    for problem in CALLS:
        for deterministic in (False, True):
            assert backward(problem, device, deterministic=deterministic).launches
