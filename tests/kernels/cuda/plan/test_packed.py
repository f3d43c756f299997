"""Plans of packed sequences, whose offsets are known only on the device; no GPU."""

from itertools import pairwise
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked, backward, forward, kernels
from tileattn.call.problem import Problem
from tileattn.call.sequences import FAR
from tileattn.kernels.cuda.families.block_order import COUNTS, ORDERS_KEYS, ORDERS_QUERIES
from tileattn.kernels.cuda.families.float32 import (
    FLOAT32_BACKWARD,
    FLOAT32_DQ,
    FLOAT32_FORWARD,
)
from tileattn.kernels.cuda.families.hopper import (
    HOPPER,
    HOPPER_BACKWARD,
    HOPPER_WIDE,
    HOPPER_WIDE_DQ,
)
from tileattn.kernels.cuda.families.wide import WIDE
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import CallLayout, contiguous, contiguous_inputs

S, HQ, HKV, TQ, TK = 5, 6, 2, 1000, 1300


def packed(dtype: str = "float16", D: int = 64, **changed: Any) -> Problem:
    sizes: dict[str, Any] = {"B": 1, "Hq": HQ, "Hkv": HKV, "Nq": TQ, "Nk": TK, "D": D, "Dv": D}
    return asked(dtype, {"cu_seqlens_q"}, **{**sizes, "sequences": S, **changed})


def on_device(problem: Problem) -> CallLayout:
    """Describe a call whose offsets are on the device, and decide about lengths alone."""
    offsets = contiguous((S + 1,), "int64")
    layout = contiguous_inputs(problem).with_arrays(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    return layout._replace(kv_lengths=None, q_offset=None)


@pytest.mark.parametrize(
    ("device", "dtype", "D", "names"),
    [
        (H200, "float16", 64, [HOPPER, HOPPER_BACKWARD, "backward_dq_convert_sm90"]),
        (H200, "bfloat16", 200, [HOPPER, HOPPER_WIDE, HOPPER_WIDE_DQ]),
        (H200, "float32", 64, [FLOAT32_FORWARD, FLOAT32_BACKWARD, FLOAT32_DQ]),
        (H200, "float32", 300, ["forward", "naive_dkdv", "naive_dq"]),
        (A100, "float16", 64, ["forward", "backward_dkdv", "backward_dq_convert"]),
        (A100, "float64", 300, ["forward", "naive_dkdv", "naive_dq"]),
        (A100, "float64", 520, ["naive_forward", "naive_dkdv", "naive_dq"]),
        (H200, "bfloat16", 512, [WIDE]),
    ],
)
def test_their_kernels(device: Device, dtype: str, D: int, names: list[str]) -> None:
    problem = packed(dtype, D)
    plans = [forward(problem, device, on_device(problem))]
    plans += [backward(problem, device, on_device(problem), deterministic=x) for x in (False, True)]
    assert {name for plan in plans for name in kernels(plan)} >= set(names)
    for plan in plans:
        assert all(launch.key.packed for launch in plan.launches)
        assert "assignment" not in plan.constants
        assert (plan.fields["length"], plan.fields["offset"]) == (FAR, -(1 << 62))
        assert (plan.fields["B"], plan.fields["entries"]) == (1, S)


def test_grids_and_memory() -> None:
    """They depend on the numbers of tokens and sequences alone."""
    problem = packed("float32")
    launch = forward(problem, A100, on_device(problem)).launches[1]
    assert launch.grid == HQ * (TQ // launch.key.block_q + S)
    plan = backward(problem, A100, on_device(problem), deterministic=True)
    grids = {launch.key.kernel: launch for launch in plan.launches}
    dkdv, rows = grids["backward_dkdv"], (TQ // 128 + 2 * S) * 128
    assert dkdv.grid == HKV * (TK // dkdv.key.block_k + S)
    assert plan.fields["rows"] == rows
    starts = plan.workspace.starts
    assert starts["lse_log2"] - starts["delta"] == HQ * rows * 4
    assert plan.workspace.nbytes - starts["head_flags"] == (2 + S * HKV) * 4
    on_hopper = backward(packed(), H200, on_device(packed()))
    block_q = next(x.key.block_q for x in on_hopper.launches if x.key.kernel == HOPPER_BACKWARD)
    starts = on_hopper.workspace.starts
    assert starts["dq_counter"] - starts["dq_semaphore"] >= HQ * (TQ // block_q + S) * 4
    assert on_hopper.workspace.nbytes - starts["dq_counter"] == S * HKV * 4


@pytest.mark.parametrize("window", [(None, None), (None, 0)])
@pytest.mark.parametrize("D", [64, 128, 192])
def test_tiles_do_not_depend_on_lengths(D: int, window: tuple[None, int | None]) -> None:
    """Nor on the number of sequences, so a sequence has the same bits in any batch.

    Forward tiles with more queries, but as many keys, give the same bits.
    """
    tiles = set()
    for tokens, sequences in ((1, 1), (300, 7), (1056, 1), (1 << 20, 2)):
        problem = packed(D=D, Nq=tokens, Nk=tokens, sequences=sequences, window=window)
        plans = forward(problem, H200), backward(problem, H200)
        forward_keys, backward_keys = (
            [x.key for x in plan.launches if x.key.kernel not in COUNTS.values()] for plan in plans
        )
        keys_of_tiles = tuple(key.block_k for key in forward_keys)
        tiles.add((keys_of_tiles, tuple(key.tile for key in backward_keys)))
    assert len(tiles) == 1


@pytest.mark.parametrize("window", [(None, None), (None, 0), (9, 0)])
def test_a_kernel_puts_the_work_tiles_of_hopper_in_order(window: tuple[None, int | None]) -> None:
    problem = packed(window=window)
    layout = on_device(problem)
    plans = forward(problem, H200, layout), backward(problem, H200, layout, deterministic=True)
    for plan, kernel, rows in zip(plans, (ORDERS_QUERIES, ORDERS_KEYS), (TQ, TK), strict=True):
        order, main = next(x for x in pairwise(plan.launches) if "sm90" in x[1].key.kernel)
        assert (order.key.kernel, order.key.packed) == (kernel, True)
        block = main.key.block_q if kernel == ORDERS_QUERIES else main.key.block_k
        assert order.key.tile[:2] == main.key.tile[:2]
        count = rows // block + S
        together = order.key.threads // 32  # a warp finds the place of one
        assert (order.grid - 1) * together < count <= order.grid * together
        starts = plan.workspace.starts
        end = min([x for x in starts.values() if x > starts["block_order"]] or [10**9])
        assert end - starts["block_order"] >= count * 48
    names = {name for n in (forward, backward) for name in kernels(n(problem, A100, layout))}
    assert names.isdisjoint({ORDERS_QUERIES, ORDERS_KEYS})


def test_both_kernels_of_wide_heads_have_an_order() -> None:
    """The second one is written over the first."""
    plan = backward(packed(D=256), H200, on_device(packed(D=256)))
    pairs = [x for x in pairwise(plan.launches) if x[0].key.kernel in (ORDERS_KEYS, ORDERS_QUERIES)]
    assert [(order.key.kernel, main.key.kernel) for order, main in pairs] == [
        (ORDERS_KEYS, HOPPER_WIDE),
        (ORDERS_QUERIES, HOPPER_WIDE_DQ),
    ]
    assert all(order.key.tile == main.key.tile for order, main in pairs)
    starts = plan.workspace.starts
    end = min(x for x in starts.values() if x > starts["block_order"])
    assert end - starts["block_order"] >= (TK // 64 + S) * 48
    assert "next_tiles" not in starts


def test_offsets_on_the_host_are_uploaded() -> None:
    problem = packed()
    ends = (("cu_seqlens_q", (0, 1, 2, 2, 9, TQ)), ("cu_seqlens_k", (0, 5, 6, 6, 7, TK)))
    plan = forward(problem, H200, contiguous_inputs(problem)._replace(cu_seqlens=ends))
    found = {name: tuple(plan.constants[name].array().tolist()) for name, _ in ends}
    assert found == dict(ends)
