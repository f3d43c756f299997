"""The generic kernels: which tile a call has, and what it launches."""

from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked, backward, forward, kernels
from tileattn.kernels.cuda.jit.compile import compiled

SMALL_KEYS = H200.tuning.small_block_keys


@pytest.mark.parametrize(
    ("changed", "keys", "writes"),
    [
        ({}, 64, False),  # columns are many
        ({"D": 32}, 64, True),
        ({"D": 96, "Dv": 80}, 64, False),
        ({"D": 32, "window": (None, 0)}, 64, True),
        ({"D": 32, "Nq": 3}, 64, True),
        ({"D": 32, "Dv": 32, "Nk": 65}, 64, False),
        ({"D": 32, "Dv": 32, "Nk": SMALL_KEYS, "Nq": 100}, 64, False),
        ({"D": 32, "Dv": 32, "Nk": SMALL_KEYS + 1, "Nq": 100}, 128, False),
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dq_is_written_but_in_a_fixed_order(dtype: str) -> None:
    """In deterministic mode one kernel computes dq of all heads, with the same bits."""
    problem = asked(dtype, Nq=64, Nk=64)
    assert [x.key.write_dq for x in backward(problem, A100).launches] == [False, False, True, False]
    plan = backward(problem, A100, deterministic=True)
    assert kernels(plan)[2:] == ["backward_dkdv", "backward_dq"]
    assert not any(x.key.write_dq or x.key.add_dq for x in plan.launches)


@pytest.mark.parametrize(
    ("changed", "is_small"),
    [({}, True), ({"Nq": 65}, False), ({"Nk": 65}, False), ({"D": 72}, False), ({"Dv": 72}, False)],
)
def test_small_tiles_instead_of_the_hopper_kernels(changed: Any, is_small: bool) -> None:
    """In 16 bits, if a tile has all queries and keys and the order of sums does not matter."""
    problem = asked("bfloat16", **{"Nq": 64, "Nk": 64, "D": 64, "Dv": 64} | changed)
    assert "backward_sm90" in kernels(backward(problem, H200, deterministic=True))
    plan = backward(problem, H200)
    assert ("backward_sm90" in kernels(plan)) is not is_small
    why = "not the Hopper kernel, because a small tile has all queries and keys; "
    assert any(launch.why.startswith(why) for launch in plan.launches) is is_small


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_kernels_of_narrow_heads_have_16_columns_and_spill_nothing(dtype: str) -> None:
    problem = asked(dtype, Nq=42, Nk=42, D=8, Dv=8)
    keys = {x.key for plan in (forward, backward) for x in plan(problem, H200).launches}
    assert {key.kernel for key in keys} >= {"forward", "backward_preprocess", "backward_dkdv"}
    for key in keys:
        assert key.value_dim == 16
        assert compiled(key, "sm_90a").spill_bytes == 0, key


def test_kernels_of_16_bits_have_32_columns_or_more() -> None:
    problem = asked("bfloat16", Nq=42, Nk=42, D=8, Dv=8)
    launches = [*forward(problem, A100).launches, *backward(problem, A100).launches]
    assert {x.key.value_dim for x in launches} == {32}
