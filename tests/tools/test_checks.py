"""The project's own checks fail where they should."""

from collections.abc import Callable
from typing import Any

import pytest

from tools.check_docstrings import exempt, members
from tools.check_wheel import REQUIRED, problems

GOOD = [*sorted(REQUIRED), "tileattn-0.1.0.dist-info/METADATA"]
LOAD = "tileattn/kernels/jit/load.py"
WHEEL = "tileattn-0.1.0-py3-none-any.whl"


def test_a_plain_wheel_passes() -> None:
    assert problems(GOOD, WHEEL) == []


@pytest.mark.parametrize(
    ("names", "wheel", "said"),
    [
        ([*GOOD, "tileattn/fast.so"], WHEEL, "tileattn/fast.so: compiled code"),
        ([*GOOD, "tileattn/kernels/a.cubin"], WHEEL, "tileattn/kernels/a.cubin: compiled code"),
        ([*GOOD, "tests/test_api.py"], WHEEL, "tests/test_api.py: outside the package"),
        ([name for name in GOOD if "typed" not in name], WHEEL, "tileattn/py.typed: missing"),
        ([name for name in GOOD if "load.py" not in name], WHEEL, f"{LOAD}: missing"),
        (GOOD, "a-cp311-cp311-linux.whl", "a-cp311-cp311-linux.whl: the tag is not py3-none-any"),
    ],
)
def test_each_fault_of_a_wheel_is_named(names: list[str], wheel: str, said: str) -> None:
    assert problems(names, wheel) == [said]


class Sample:
    def method(self) -> None: ...

    @property
    def value(self) -> int:
        return 1

    def _private(self) -> None: ...


def test_docstrings_of_methods_and_properties_are_looked_at() -> None:
    assert [name for name, _ in members(Sample, "m.Sample")] == [
        "m.Sample.method",
        "m.Sample.value",
    ]


def takes_options(**options: Any) -> None: ...


def takes_none() -> None: ...


@pytest.mark.parametrize(
    ("function", "public", "rules"),
    [
        (takes_none, True, set()),
        (takes_none, False, {"GL08", "PR01", "RT01"}),
        (takes_options, True, {"PR02"}),
        (takes_options, False, {"GL08", "PR01", "PR02", "RT01"}),
    ],
)
def test_rules_that_an_object_need_not_follow(
    function: Callable[..., None], public: bool, rules: set[str]
) -> None:
    assert exempt(function, public=public) == rules
