"""Which calls the Hopper kernel for few rows takes, and how it cuts the keys; no GPU."""

from dataclasses import replace
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import A100, H200, asked, forward
from tileattn.dtypes import INT8
from tileattn.kernels.cuda.families.decode import DECODE
from tileattn.kernels.cuda.families.split import COMBINE
from tileattn.kernels.cuda.plan.plan import LaunchPlan

SIZES: dict[str, Any] = {"B": 1, "Hq": 32, "Hkv": 8, "Nq": 1, "Nk": 4096, "D": 128, "Dv": 128}


def plan(options: Any = (), dtype: str = "bfloat16", **changed: Any) -> LaunchPlan:
    return forward(asked(dtype, {"kv_lengths", *options}, **SIZES | changed), H200)


def keys_of(made: LaunchPlan) -> tuple[int, ...]:
    """Return the keys of a piece, of a split and of a group."""
    return tuple(made.fields[f"{name}_keys"] for name in ("piece", "split", "group"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("Nq", [1, 4, 8])
def test_splits_are_pieces_if_there_would_be_few(Nq: int, dtype: str) -> None:
    """Pieces and groups depend on neither batch nor length: so the bits of a row do not."""
    few, many = (plan(dtype=dtype, Nq=Nq, B=B) for B in (1, 64))
    group = 1024 if Nq < 8 else 2048
    assert keys_of(few) == (256, 256, group)
    assert keys_of(many) == (256, group, group)
    assert keys_of(plan(dtype=dtype, Nq=Nq, Nk=1 << 20)) == keys_of(many)
    for made in (few, many):
        first, join = made.launches
        assert (first.key.kernel, join.key.kernel) == (DECODE, COMBINE)
        assert first.key.block_q == (16 if Nq < 8 else 32)
        assert first.grid <= 2 * H200.sm_count
        assert made.fields["splits"] * made.fields["split_keys"] == 4096


@pytest.mark.parametrize("dim", range(8, 257, 8))
@pytest.mark.parametrize("page", [None, 8, 64])
def test_every_head_dimension_fits(dim: int, page: int | None) -> None:
    """Tiles divide pieces, pieces divide groups, and thread blocks have their shared memory."""
    for D, Dv in ((dim, dim), (64, dim), (dim, 64)):
        for Nq in (1, 8):
            made = plan(D=D, Dv=Dv, Nq=Nq, page=page)
            first = made.launches[0]
            assert first.key.kernel == DECODE
            assert first.key.value_dim % 64 == 0
            piece, split, group = keys_of(made)
            assert (piece % first.key.block_k, split % piece, group % split) == (0, 0, 0)
            # The system takes 1 KiB of each thread block; the static memory takes 2 KiB at most.
            each = first.shared_bytes + (3 << 10)
            assert each * first.key.min_blocks_per_sm <= 228 << 10
            assert first.key.producer_warps == (4 if page == 8 else 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"Nq": 9},
        {"dtype": "float32"},
        {"options": ["alibi_slopes"]},
        {"options": ["bias"]},
        {"options": ["mask"]},
        {"Dv": 124},
        *({"kv_dtype": INT8} | more for more in ({"Nq": 5}, {"page": 8}, {"D": 40}, {"Dv": 72})),
    ],
    ids=str,
)
def test_what_it_leaves_to_others(changed: dict[str, Any]) -> None:
    assert plan(**changed).launches[0].key.kernel != DECODE


@pytest.mark.parametrize("dim", range(16, 257, 16))
@pytest.mark.parametrize("page", [None, 16, 48])
def test_8_bits_fit(dim: int, page: int | None) -> None:
    for D, Dv in ((dim, dim), (64, dim), (dim, 64)):
        made = plan(D=D, Dv=Dv, page=page, kv_dtype=INT8)
        key = made.launches[0].key
        assert (key.kernel, key.block_k, key.producer_warps) == (DECODE, 128, 2)
        piece, split, group = keys_of(made)
        assert (piece % 128, split % piece, group % split) == (0, 0, 0)
        factors = 2 * key.stages * key.block_k * 4
        each = made.launches[0].shared_bytes + factors + (4 << 10)
        assert each * key.min_blocks_per_sm <= 228 << 10


def test_partial_sums_of_packed_keys_are_bounded() -> None:
    """A sequence might have all keys of all sequences."""
    options = {"cu_seqlens_q", "cu_seqlens_k"}
    sizes = SIZES | {"Nq": 256, "Nk": 256 << 12}
    for dtype in (None, INT8):
        P = replace(asked("bfloat16", options, **sizes), sequences=256, kv_dtype=dtype)
        assert forward(P, H200).workspace.nbytes < 1 << 20


def test_a_negative_scale_is_applied_to_each_score() -> None:
    P = replace(asked("bfloat16", {"kv_lengths"}, **SIZES), scale=-1.0)
    key = forward(P, H200).launches[0].key
    assert (key.kernel, key.fold_scale) == (DECODE, False)


def test_other_gpus_have_other_kernels() -> None:
    made = forward(asked("bfloat16", {"kv_lengths"}, **SIZES), A100)
    assert made.launches[0].key.kernel != DECODE
