"""The generic kernels: which tile a call has, and what it launches."""

from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import H200, asked, backward, kernels


@pytest.mark.parametrize(
    ("changed", "keys", "writes"),
    [
        ({}, 64, True),
        ({"D": 96, "Dv": 80}, 64, True),
        ({"window": (None, 0)}, 64, False),  # some query tile may be empty
        ({"Nk": 65}, 128, False),
        ({"D": 200}, 32, False),
    ],
)
def test_one_block_of_all_keys_writes_dq(changed: Any, keys: int, writes: bool) -> None:
    """Then no kernel sums or rounds dq, and in float32 the block is small."""
    problem = asked("float32", **{"Nq": 300, "Nk": 64, "D": 40, "Dv": 40} | changed)
    plan = backward(problem, H200)
    (own,) = (x for x in plan.launches if x.key.kernel == "backward_dkdv")
    assert (own.key.block_k, own.key.add_dq, own.key.write_dq) == (keys, True, writes)
    assert ("backward_dq_convert" in kernels(plan)) == (not writes)
    assert ("dq_accum" in plan.workspace.starts) == (not writes)
