"""Packed sequences: what ``parse`` makes of their offsets, and what it refuses."""

import re
from typing import Any

import numpy as np
import pytest

import tileattn
from tileattn.call.parse import parse

HQ, HKV, D, DV = 4, 2, 8, 6
CU_Q, CU_K = [0, 3, 3, 7], [0, 5, 6, 11]
Q = np.zeros((HQ, 7, D), np.float32)
K = np.zeros((HKV, 11, D), np.float32)
V = np.zeros((HKV, 11, DV), np.float32)
PACKED: dict[str, Any] = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}


def test_sequences_take_the_place_of_batch_entries() -> None:
    problem, x = parse(Q, K, V, PACKED)
    assert (problem.B, problem.Nq, problem.Nk) == (1, 7, 11)
    assert problem.sequences == problem.entries == 3
    assert problem.out_shape == (HQ, 7, DV)
    np.testing.assert_array_equal(x.kv_lengths, [5, 1, 5])
    np.testing.assert_array_equal(x.q_offset, [2, 1, 1])
    assert x.packing is not None
    assert x.packing.longest(7, 11) == (4, 5)


def test_without_offsets_entries_are_those_of_the_batch() -> None:
    problem, x = parse(Q, K, V, {"cu_seqlens_q": None})
    assert problem.entries == 1
    assert problem.sequences is None
    assert x.packing is None


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: np.array(x, np.int32)])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_one_of_the_two_means_both(name: str, kind: Any) -> None:
    _, x = parse(Q, Q, Q, {name: kind(CU_Q)})
    assert x.packing is not None
    for offsets in x.packing:
        assert offsets.dtype == np.int64
        np.testing.assert_array_equal(offsets, CU_Q)


@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
def test_arrays_may_have_leading_axes_of_one(lead: tuple[int, ...]) -> None:
    x = np.zeros((*lead, 7, D))
    assert parse(x, x, x, {"cu_seqlens_q": CU_Q})[0].out_shape == x.shape


def test_no_sequence_at_all() -> None:
    x = np.zeros((HQ, 0, D))
    attention = tileattn.forward(x, x, x, cu_seqlens_q=[0])
    assert attention.out.shape == (HQ, 0, D)
    grads = tileattn.backward(x, x, x, x, *attention, cu_seqlens_q=[0])
    assert grads.dq.shape == grads.dv.shape == (HQ, 0, D)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"cu_seqlens_q": 7}, ValueError, "cu_seqlens_q must have shape (S + 1,) for S sequences;"),
        ({"cu_seqlens_q": []}, ValueError, "cu_seqlens_q must have shape (S + 1,) for S sequences"),
        ({"cu_seqlens_k": [CU_K]}, ValueError, "cu_seqlens_k must have shape (S + 1,) for S seque"),
        ({"cu_seqlens_q": "0"}, TypeError, "cu_seqlens_q must be integers of shape (S + 1,); got"),
        ({"cu_seqlens_q": [0.0, 7.0]}, TypeError, "cu_seqlens_q must be integers of shape (S + 1,"),
        ({"cu_seqlens_q": [1, 3, 3, 7]}, ValueError, "cu_seqlens_q must start with 0; got 1"),
        ({"cu_seqlens_k": [0, 6, 5, 11]}, ValueError, "cu_seqlens_k must not decrease; got 5 afte"),
        (
            {"cu_seqlens_k": [0, 5, 6, 10]},
            ValueError,
            "cu_seqlens_k must end at the number of tokens of k, 11; got 10",
        ),
        (
            {"cu_seqlens_q": [0, 3, 8, 8]},
            ValueError,
            "cu_seqlens_q must end at the number of tokens of q, 7; got 8",
        ),
        (
            {"cu_seqlens_k": [0, 11]},
            ValueError,
            "cu_seqlens_k must have as many entries as cu_seqlens_q, 4; got 2",
        ),
        (
            {"cu_seqlens_k": None},
            ValueError,
            "cu_seqlens_q must end at the number of tokens of k, 11; got 7 (without "
            "cu_seqlens_k it holds for q and k)",
        ),
        (
            {"kv_lengths": [5, 2, 5]},
            ValueError,
            "kv_lengths must be from 0 to the 1 keys of sequence 1; got 2",
        ),
        ({"kv_lengths": [5]}, ValueError, "kv_lengths must be an integer, or integers of shape (3"),
        ({"alibi_slopes": np.ones((1, HQ))}, ValueError, "alibi_slopes must have shape (4,) or (3"),
        (
            {"mask": np.ones((7, 11), bool)},
            tileattn.UnsupportedError,
            "mask is not supported with cu_seqlens_q; use score_mod or mask_mod",
        ),
        ({"bias": np.ones(11)}, tileattn.UnsupportedError, "bias is not supported with cu_seqlens"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        tileattn.forward(Q, K, V, **PACKED | changed)


def test_a_batch_is_not_packed() -> None:
    x = np.zeros((2, HQ, 7, D))
    message = "q must have shape (H, T, D) or (1, H, T, D) with cu_seqlens_q; got batch size 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        tileattn.forward(x, x, x, cu_seqlens_q=CU_Q)


def test_indices_are_those_of_the_longest_sequence() -> None:
    with pytest.raises(ValueError, match=r"with 0 to 3; it has no elements"):
        tileattn.forward(Q, K, V, **PACKED, score_mod=of_query, aux=(np.zeros(0),))


def of_query(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:  # noqa: ARG001 - a score_mod's
    return s + t[i]


# --- pages --------------------------------------------------------------------------------------

PAGES: dict[str, Any] = {"block_table": [[1, 0], [2, 9]], "kv_lengths": [5, 3]}
POOL = np.zeros((3, HKV, 4, D), np.float32)
VALUES = np.zeros((3, HKV, 4, DV), np.float32)
QUERY = np.zeros((2, HQ, 1, D), np.float32)


def test_pages_take_the_place_of_batch_entries_of_keys() -> None:
    problem, x = parse(QUERY, POOL, VALUES, PAGES)
    assert (problem.B, problem.Nk, problem.page) == (2, 8, 4)
    assert x.paging is not None
    assert x.paging.block_table.dtype == np.int64
    np.testing.assert_array_equal(x.q_offset, [4, 2])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"block_table": [1, 0]}, ValueError, "block_table must have shape (B, pages of a sequenc"),
        ({"block_table": [[1.0]]}, TypeError, "block_table must be integers of shape (B, pages of"),
        ({"block_table": [[1, 0]]}, ValueError, "block_table must have shape (2, pages of a seque"),
        (
            {"kv_lengths": [5, 5]},
            ValueError,
            "block_table must hold pages from 0 to 2; got 9 for page 1 of sequence 1",
        ),
        (
            {"block_table": [[-1, 0], [0, 0]]},
            ValueError,
            "block_table must hold pages from 0 to 2; got -1 for page 0 of sequence 0",
        ),
        ({"kv_lengths": [9, 3]}, ValueError, "kv_lengths must be from 0 to Nk = 8; got 9"),
        ({"kv_lengths": None}, ValueError, "kv_lengths must be given with block_table"),
        ({"cu_seqlens_k": [0, 3]}, ValueError, "cu_seqlens_k must be None with block_table;"),
        ({"k": POOL[0]}, ValueError, "k must have shape (pages, Hkv, page, D) with block_table; g"),
        ({"v": VALUES[:2]}, ValueError, "v must have the number of pages of k, 3; got 2"),
        ({"v": VALUES[:, :, :3]}, ValueError, "v must have the length of k, 4; got 3"),
    ],
)
def test_pages_that_are_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    call: dict[str, Any] = {"q": QUERY, "k": POOL, "v": VALUES, **PAGES, **changed}
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        tileattn.forward(**call)


def test_packed_queries_over_pages_end_with_the_tokens() -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens_q must end at .* of q, 2; got 3$"):
        tileattn.forward(QUERY[0].repeat(2, 1), POOL, VALUES, **PAGES, cu_seqlens_q=[0, 1, 3])
