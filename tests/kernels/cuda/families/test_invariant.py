"""Which kernels take calls with ``invariant=True``, and what decides about the keys of a tile."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import asked
from tileattn.dtypes import INT8, NAMED
from tileattn.errors import UnsupportedError
from tileattn.kernels.cuda.families.families import forward_launches
from tileattn.kernels.cuda.families.pages import why_not_cache
from tileattn.kernels.cuda.families.tiles import HEAD_DIM_BUCKETS
from tileattn.kernels.cuda.plan.catalog import context_of

SIZES: dict[str, Any] = {"B": 2, "Hq": 8, "Hkv": 2}
LENGTHS = (1, 37, 300, 4096, 9000)


def keys_of_tiles(arch: str, dtype: str, dim: int, options: set[str]) -> set[int]:
    """Return the keys of the tiles of all kernels that compute scores."""
    found = set()
    for Nq, Nk, alignment, bias, block in product(
        LENGTHS, LENGTHS, (16, 2), (0, 4, 16), (0, 48, 128)
    ):
        problem = asked(dtype, {"invariant", *options}, **SIZES, Nq=Nq, Nk=Nk, D=dim, Dv=dim)
        context = context_of(arch, alignment)
        if "bias" in options:
            context = context._replace(bias="bfloat16", bias_alignment_bytes=bias)
        if "block_mask" in options:
            context = context._replace(mask_block_k=block)
        main = next(x for x in forward_launches(problem, context) if x.traits.main)
        found.add((alignment if arch == "sm_90a" else 0, main.key.block_k))
    by_alignment = {alignment for alignment, _ in found}
    assert len(found) == len(by_alignment)  # unaligned rows run in another kernel
    return {keys for _, keys in found}


@pytest.mark.parametrize("options", [set(), {"bias"}, {"block_mask"}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_tiles_have_the_same_keys_in_all_calls(arch: str, dtype: str, options: set[str]) -> None:
    for dim in HEAD_DIM_BUCKETS[1:]:
        assert keys_of_tiles(arch, dtype, dim, options)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_dtype": INT8}, "k_descale and v_descale: with invariant"),
        ({"dtype": NAMED["float32"]}, "block_table: with invariant in float32"),
        ({"Dv": 60}, "block_table: with invariant and Dv that is not a multiple of 8"),
        ({"D": 320, "Dv": 320}, "block_table: with a head dimension above 256"),
    ],
    ids=str,
)
def test_refusals_are_known_before_a_plan(changes: dict[str, Any], why: str) -> None:
    sizes = {**SIZES, "Nq": 1, "Nk": 96, "D": 64, "Dv": 64}
    problem = asked("bfloat16", {"invariant", "kv_lengths", "block_table"}, **sizes)
    made: dict[str, Any] = {"page": 16, **changes}
    problem = replace(problem, **made)
    found = why_not_cache(problem)
    assert found is not None
    assert found.startswith(why)
    if not problem.is_quantised:
        return
    with pytest.raises(UnsupportedError, match="with invariant"):
        forward_launches(problem, context_of("sm_90a"))
