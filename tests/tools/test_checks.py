"""The project's own checks fail where they should."""

from tools.check_docstrings import members
from tools.check_wheel import REQUIRED, problems

GOOD = [*sorted(REQUIRED), "tileattn-0.1.0.dist-info/METADATA"]
LOAD = "tileattn/kernels/cuda/jit/load.py"
WHEEL = "tileattn-0.1.0-py3-none-any.whl"


def test_a_plain_wheel_passes() -> None:
    assert problems(GOOD, WHEEL) == []


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
