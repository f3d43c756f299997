"""The generic kernels: which tile a call has, and what it launches."""

from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import H200, asked, backward


@pytest.mark.parametrize(
    ("changed", "keys"), [({}, 64), ({"D": 96, "Dv": 80}, 64), ({"Nk": 65}, 128), ({"D": 200}, 32)]
)
def test_small_tiles_of_few_keys(changed: Any, keys: int) -> None:
    """A smaller tile has all keys, if there is one of 64 keys."""
    problem = asked("float32", **{"Nq": 300, "Nk": 64, "D": 40, "Dv": 40} | changed)
    plan = backward(problem, H200)
    (own,) = (x for x in plan.launches if x.key.kernel == "backward_dkdv")
    assert own.key.block_k == keys
