"""Plans of the backward pass of head dimensions above 256, by pairs of thread blocks; no GPU."""

from dataclasses import replace
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked, backward, kernels
from tileattn.kernels.cuda.families.hopper import HOPPER_WIDE, HOPPER_WIDE_DQ
from tileattn.kernels.cuda.families.paired import PAIRED_BACKWARD_FAMILY
from tileattn.kernels.cuda.families.shared_memory import HOPPER_STATIC
from tileattn.kernels.cuda.plan.device import Device

OWN = (HOPPER_WIDE, HOPPER_WIDE_DQ)
NAIVE = ["naive_dkdv", "naive_dq"]


def plan(D: int, Dv: int, dtype: str = "bfloat16", device: Device = H200, **changed: Any) -> Any:
    sizes = {"B": 2, "Hq": 4, "Hkv": 2, "Nq": 700, "Nk": 900, "D": D, "Dv": Dv}
    options = changed.pop("options", set())
    return backward(asked(dtype, options, **sizes | changed), device)


@pytest.mark.parametrize("dims", [(512, 512), (264, 256), (320, 8), (64, 384), (392, 328)])
def test_a_plan(dims: tuple[int, int]) -> None:
    """Whole pairs of thread blocks, which have half of the columns and fit in shared memory."""
    made = plan(*dims)
    own = [x for x in made.launches if x.key.kernel in OWN]
    assert [x.key.kernel for x in own] == list(OWN)
    for launch in own:
        assert launch.key.pair
        assert launch.grid % 2 == 0
        assert launch.key.head_dim >= dims[0]
        assert launch.key.value_dim >= dims[1]
        assert launch.shared_bytes + HOPPER_STATIC <= H200.shared_limit
    assert made.kind.main is not None
    assert made.kind.main.key == own[0].key
    # Only flagged heads are computed row by row.
    assert all(x.key.head_flags for x in made.launches if x.key.kernel.startswith("naive"))


def test_both_thread_blocks_of_a_pair_are_one_worker() -> None:
    """A GPU with an odd number of SMs leaves one idle."""
    made = plan(512, 512, device=replace(H200, sm_count=5), Nk=10_000)
    assert (made.kind.main.key.kernel, made.launches[1].key.kernel) == (HOPPER_WIDE, HOPPER_WIDE)
    main = next(x for x in made.launches if x.key.kernel == HOPPER_WIDE)
    assert (main.grid, main.workers) == (4, 2)


@pytest.mark.parametrize(
    ("why", "changed"),
    [
        ("compute capability", {"device": A100}),
        ("neither float16 nor bfloat16", {"dtype": "float32"}),
        ("above 512", {"D": 520}),
        ("not aligned to 16 bytes", {"D": 300}),
        ("bias is in use", {"options": {"bias"}}),
    ],
)
def test_what_they_do_not_support(why: str, changed: dict[str, Any]) -> None:
    made = plan(**{"D": 512, "Dv": 512} | changed)
    assert not set(OWN) & set(kernels(made))
    assert set(NAIVE) <= set(kernels(made))
    said = next(x.why for x in made.launches if PAIRED_BACKWARD_FAMILY.name in x.why)
    assert why in said
