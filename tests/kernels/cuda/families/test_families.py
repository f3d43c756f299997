"""Which family runs a pass: the first one that is meant for the call and does not refuse it."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import ON_HOPPER
from tileattn.call.problem import problem_of
from tileattn.errors import UnsupportedError
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.families import FORWARD
from tileattn.kernels.cuda.families.family import Family, launches_of
from tileattn.kernels.cuda.families.grid import Grid
from tileattn.kernels.cuda.families.key import KernelKey

LAUNCH = KernelLaunch(KernelKey("forward_fp8", "float8_e4m3fn"), Grid("queries", 128), why="fp8")
FP8 = Family(
    "the float8 kernel",
    lambda *_: (LAUNCH,),
    lambda P, _: None if P.dtype.itemsize == 1 else "dtype is not float8",
)
HALF = replace(problem_of("float16", 64), Nq=200, Nk=300)
EIGHTH = replace(HALF, dtype=np.dtype(ml_dtypes.float8_e4m3fn))


def test_a_new_dtype_is_a_family_in_front_of_the_others() -> None:
    assert launches_of((FP8, *FORWARD), EIGHTH, ON_HOPPER) == (LAUNCH,)
    first, *_ = launches_of((FP8, *FORWARD), HALF, ON_HOPPER)
    assert first.why.startswith("not the float8 kernel, because dtype is not float8; ")
    assert first.why.endswith(launches_of(FORWARD, HALF, ON_HOPPER)[0].why)


@pytest.mark.parametrize("sizes", [{}, {"Nq": 1, "Nk": 9000}, {"Nq": 1, "Nk": 9000, "Hq": 64}])
def test_no_other_family_takes_a_new_dtype(sizes: dict[str, Any]) -> None:
    problem = replace(EIGHTH, **sizes)
    with pytest.raises(UnsupportedError, match=r"does not support float8_e4m3fn here: .*dtype"):
        launches_of(FORWARD, problem, ON_HOPPER)
