"""Kernels that the wheel brings: every kernel of what training and decoding usually call."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tileattn.call.problem import Problem, problem_of
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan import catalog
from tileattn.kernels.cuda.plan.device import Device, device_of_arch
from tileattn.kernels.cuda.plan.layout import CallLayout, contiguous, contiguous_inputs
from tileattn.kernels.cuda.plan.plan import plans_of

H100 = device_of_arch("sm_90a")
RTX_4090 = replace(device_of_arch("sm_89"), sm_count=128)
GPUS = {"sm_80": device_of_arch("sm_80"), "sm_89": RTX_4090, "sm_90a": H100}


def sized(options: tuple[str, ...], *sizes: int, **facts: Any) -> Problem:
    """Make a bfloat16 problem: B, Hq, Hkv, Nq, Nk and D."""
    B, Hq, Hkv, Nq, Nk, dim = sizes
    problem = problem_of("bfloat16", dim, options)
    return replace(problem, B=B, Hq=Hq, Hkv=Hkv, Nq=Nq, Nk=Nk, **facts)


def strided(problem: Problem, longest: int) -> CallLayout:
    """Describe inputs that are the first rows of longer arrays, with lengths on the device."""
    layout = contiguous_inputs(problem)
    rows = contiguous_inputs(replace(problem, Nq=longest, Nk=longest))
    arrays = {
        name: x._replace(strides=long.strides)
        for (name, x), (_, long) in zip(layout.arrays, rows.arrays, strict=True)
    }
    lengths = {"kv_lengths": contiguous((problem.B,), "int32")} if problem.has_lengths else {}
    return layout._replace(kv_lengths=None if lengths else layout.kv_lengths).with_arrays(
        **arrays, **lengths
    )


def calls() -> Iterator[tuple[Problem, CallLayout, int]]:
    """Yield calls of loops in which nothing repeats, and how many of their plans are needed."""
    causal: dict[str, Any] = {"window": (None, 0)}
    for n in (900, 1299):  # a cache that grows, and lengths that do
        grows = sized((), 4, 32, 8, 1, n, 128)
        yield grows, strided(grows, 4096), 1
        for capacity in (n, 4096):
            counted = sized(("kv_lengths",), 4, 32, 8, 1, capacity, 128)
            yield counted, strided(counted, 4096), 1
            yield counted, contiguous_inputs(counted), 1
    for n in (301, 777, 1024, 1499):  # batches padded to their longest sequence
        padded = sized((), 8, 12, 12, n, n, 64, **causal)
        yield padded, strided(padded, 1500), 3
        dropped = sized(("dropout_p",), 8, 12, 12, n, n, 64, **causal)
        yield dropped, strided(dropped, 1500), 3
    for n, sequences in product((5003, 9000), (16, 3)):
        offsets = ("cu_seqlens_q", "cu_seqlens_k")
        packed = sized(offsets, 1, 16, 16, n, n, 64, sequences=sequences, **causal)
        yield packed, strided(packed, 16 * 900), 3


def missing(gpu: Device, shipped: set[KernelKey]) -> set[str]:
    return {
        f"{launch.key} of {problem}"
        for problem, layout, count in calls()
        for plan in plans_of(problem, layout, gpu)[:count]
        for launch in plan.launches
        if launch.key not in shipped
    }


@pytest.mark.parametrize(
    "arch", [pytest.param(x, marks=[pytest.mark.slow] * (x != "sm_90a")) for x in catalog.ARCHS]
)
def test_the_wheel_brings_the_kernels_of_loops_that_never_repeat(arch: str) -> None:
    shipped = set(catalog.shipped_keys(arch, ("bfloat16",), (64, 128)))
    assert missing(GPUS[arch], shipped) == set()
    others = {"append_kv", "rope", "store_values", "merge_rows", "cascade_tables"}
    assert others <= {key.kernel for key in shipped}
