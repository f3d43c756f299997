"""Plans of head dimensions from 257 to 512; no GPU."""

from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked, forward, kernels
from tileattn.kernels.cuda.families.shared_memory import HOPPER_STATIC
from tileattn.kernels.cuda.families.wide import WIDE
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.plan import LaunchPlan


def plan(
    dtype: str = "bfloat16", options: Any = (), device: Device = H200, **changed: Any
) -> LaunchPlan:
    sizes = {"B": 3, "Hq": 4, "Hkv": 2, "Nq": 300, "Nk": 500, "D": 512, "Dv": 512}
    return forward(asked(dtype, options, **sizes | changed), device)


@pytest.mark.parametrize("D", [8, 264, 320, 392, 512])
@pytest.mark.parametrize("Dv", [264, 336, 512])
def test_a_plan(D: int, Dv: int) -> None:
    made = plan(D=D, Dv=Dv)
    (launch,) = made.launches
    key = launch.key
    assert (key.kernel, key.pair) == (WIDE, True)
    assert launch.grid == 2 * 3 * 4 * 3
    assert key.head_dim >= D
    assert key.value_dim >= Dv
    assert launch.shared_bytes + HOPPER_STATIC <= H200.shared_limit
    # While a warpgroup waits for the last of four parts of the values, it holds a part of the keys.
    assert key.stages > 4


@pytest.mark.parametrize("options", [(), ("softcap",), ("alibi_slopes",), ("sinks",)])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (1023, 0)])
def test_options(options: Any, window: Any) -> None:
    assert kernels(plan(options=options, window=window)) == [WIDE]


@pytest.mark.parametrize(
    ("why", "changed"),
    [
        ("does not have compute capability 9.0", {"device": A100}),
        ("dtype is neither", {"dtype": "float32"}),
        ("dtype is neither", {"dtype": "float64"}),
        ("not a multiple of 8", {"Dv": 300}),
        ("not aligned to 16 bytes", {"D": 300}),
        ("bias is in use", {"options": {"bias"}}),
        ("dropout_p is in use", {"options": {"dropout_p"}}),
    ],
)
@pytest.mark.parametrize("device", [H200, A100])
def test_other_calls_have_generic_tiles(why: str, changed: dict[str, Any], device: Device) -> None:
    made = plan(**{"device": device} | changed)
    (launch,) = made.launches
    assert launch.key.kernel == "forward"
    assert launch.key.value_dim <= 256  # others follow in other thread blocks
    (said,) = (part for part in launch.why.split("; ") if "for wide heads" in part)
    assert why in said or device is A100


def test_wider_heads_have_no_tiles() -> None:
    assert kernels(plan(D=520)) == ["naive_forward"]
