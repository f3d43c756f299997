"""Which calls the split-KV kernel takes, and with which tiles."""

from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked, forward, kernels
from tileattn.kernels.cuda.families.decode import DECODE
from tileattn.kernels.cuda.families.hopper import HOPPER
from tileattn.kernels.cuda.families.split import SPLIT

SHORT = {"B": 4, "Hq": 8, "Hkv": 2, "Nq": 1, "Nk": 200, "D": 128, "Dv": 128}


def first(dtype: str = "bfloat16", options: Any = (), **changed: int) -> str:
    """Name the first kernel of a call over a short cache."""
    return kernels(forward(asked(dtype, options, **SHORT | changed), H200))[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("Nk", [1, 16, 511])
@pytest.mark.parametrize("heads", [(8, 2, 1), (8, 8, 1), (8, 8, 2), (8, 2, 4)])
def test_few_queries_over_short_caches(heads: tuple[int, int, int], Nk: int, dtype: str) -> None:
    """A tile of one head would be mostly empty."""
    Hq, Hkv, Nq = heads
    kernel = DECODE if dtype == "bfloat16" else SPLIT
    assert first(dtype, Hq=Hq, Hkv=Hkv, Nq=Nq, Nk=Nk) == kernel


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ((), {"Hkv": 8, "Nq": 3}),
        ((), {"Nq": 17}),
        (("alibi_slopes",), {}),
        (("dropout_p",), {}),
    ],
)
def test_short_caches_that_keep_their_tiles(options: Any, changed: dict[str, int]) -> None:
    assert first("bfloat16", options, **changed) == HOPPER


def test_other_gpus_do_the_same() -> None:
    assert kernels(forward(asked("float16", **SHORT), A100)) == [SPLIT]
