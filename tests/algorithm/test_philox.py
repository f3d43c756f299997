"""Philox against its published vectors, against the oracle's own, and as a source of masks."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tileattn.algorithm.philox import dropout_mask, keep_tile, philox4x32
from tileattn.oracle import dropout as reference

ONES = 0xFFFFFFFF

# Random123's known-answer file (kat_vectors, philox4x32 with 10 rounds).
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES,) * 4, (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def scalar_keep(seed: int, dropout_p: float, b: int, h: int, i: int, j: int) -> bool:
    """One element by the published layout, through the public generator, in plain integers."""
    counter = ((j >> 4) * 8 + (j & 7), (i >> 4) * 8 + (i & 7), h, b)
    words = philox4x32(counter, (seed & ONES, seed >> 32))
    word = int(words[((i >> 3) & 1) * 2 + ((j >> 3) & 1)])
    return word >= int(dropout_p * 2**32)


@pytest.mark.parametrize(("counter", "key", "answer"), PUBLISHED)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, int], answer: str) -> None:
    assert " ".join(f"{int(word):08x}" for word in philox4x32(counter, key)) == answer
    seed = key[0] | key[1] << 32
    theirs = reference.philox([np.uint64(c) for c in counter], seed)  # type: ignore[misc]  # scalars do for arrays
    assert " ".join(f"{int(word):08x}" for word in theirs) == answer


def test_counters_broadcast_and_words_have_32_bits() -> None:
    rows, columns = np.arange(3, dtype=np.uint32)[:, None], np.arange(5, dtype=np.uint32)
    words = philox4x32((columns, rows, 7, 9), (1, 2))
    assert [word.dtype for word in words] == [np.uint32] * 4
    assert [word.shape for word in words] == [(3, 5)] * 4
    one = philox4x32((4, 2, 7, 9), (1, 2))
    assert [int(word[2, 4]) for word in words] == [int(word) for word in one]


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    p=st.floats(0.05, 0.95),
    q=st.tuples(st.integers(0, 70), st.integers(0, 45)),
    k=st.tuples(st.integers(0, 70), st.integers(0, 45)),
    batch=st.integers(0, 3),
    heads=st.lists(st.integers(0, 9), max_size=3),
)
def test_a_tile_is_a_part_of_the_whole(
    seed: int, p: float, q: tuple[int, int], k: tuple[int, int], batch: int, heads: list[int]
) -> None:
    """Any tile, of any heads in any order, equals the oracle's mask of the whole problem."""
    (q_lo, rows), (k_lo, columns) = q, k
    tile = keep_tile(
        seed, p, batch, np.array(heads, np.int64), q_lo, q_lo + rows, k_lo, k_lo + columns
    )
    # As little of the problem as there is up to the ends of the tile.
    sizes = batch + 1, max(heads, default=-1) + 1, q_lo + rows, k_lo + columns
    whole = reference.keep(sizes, p, seed)
    expected = whole[batch][heads, q_lo : q_lo + rows, k_lo : k_lo + columns]
    assert tile.dtype == np.bool_
    assert tile.shape == (len(heads), rows, columns)
    np.testing.assert_array_equal(tile, expected)


def test_every_element_equals_its_scalar_evaluation() -> None:
    shape, p, seed = (2, 3, 19, 37), 0.4, 0x0123456789ABCDEF
    kept = dropout_mask(shape, p, seed)
    for index in np.ndindex(*shape):
        assert kept[index] == scalar_keep(seed, p, *index)
    assert 0 < kept.sum() < kept.size


def test_a_problem_larger_than_one_chunk_equals_the_oracle() -> None:
    shape = (1, 3, 300, 700)
    np.testing.assert_array_equal(
        dropout_mask(shape, 0.25, 2**63 + 5), reference.keep(shape, 0.25, 2**63 + 5)
    )


def test_indices_far_out_do_not_overflow() -> None:
    lo = 2**31 - 8
    tile = keep_tile(3, 0.5, 65535, np.array([100000]), lo, lo + 3, lo + 4, lo + 9)
    expected = [
        [scalar_keep(3, 0.5, 65535, 100000, i, j) for j in range(lo + 4, lo + 9)]
        for i in range(lo, lo + 3)
    ]
    np.testing.assert_array_equal(tile[0], expected)


@pytest.mark.parametrize("p", [0.03, 0.1, 0.5, 0.9])
def test_density_of_kept_elements_is_within_five_sigma(p: float) -> None:
    kept = dropout_mask((2, 3, 257, 311), p, seed=20240517)
    n = kept.size
    assert abs(int(kept.sum()) - n * (1 - p)) < 5 * (n * p * (1 - p)) ** 0.5


def test_neighbours_heads_batches_and_seeds_are_independent() -> None:
    kept = dropout_mask((2, 3, 200, 208), 0.5, seed=11)
    other = dropout_mask((2, 3, 200, 208), 0.5, seed=12)
    pairs = {
        "queries": (kept[:, :, 1:], kept[:, :, :-1]),
        "queries 8 apart": (kept[:, :, 8:], kept[:, :, :-8]),
        "keys": (kept[..., 1:], kept[..., :-1]),
        "keys 8 apart": (kept[..., 8:], kept[..., :-8]),
        "heads": (kept[:, 1:], kept[:, :-1]),
        "batches": (kept[1:], kept[:-1]),
        "seeds": (kept, other),
    }
    for name, (a, b) in pairs.items():
        agree, n = int((a == b).sum()), a.size
        assert abs(agree - n / 2) < 5 * (n / 4) ** 0.5, name


def test_nothing_is_dropped_at_zero_and_little_is_kept_near_one() -> None:
    assert dropout_mask((2, 3, 5, 7), 0.0, 9).all()
    assert not dropout_mask((2, 3, 5, 7), 1 - 2**-33, 9).any()


@pytest.mark.parametrize("shape", [(0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7), (2, 3, 5, 0)])
def test_axes_of_length_zero(shape: tuple[int, int, int, int]) -> None:
    assert dropout_mask(shape, 0.5, 1).shape == shape


SHAPE = (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("shape", "p", "seed", "error", "message"),
    [
        (5, 0.5, 0, TypeError, "shape must be four non-negative integers (B, Hq, Nq, Nk); got 5"),
        ((1, 2, 3.0, 4), 0.5, 0, TypeError, "(B, Hq, Nq, Nk); got (1, 2, 3.0, 4)"),
        ((1, 2, True, 4), 0.5, 0, TypeError, "(B, Hq, Nq, Nk); got (1, 2, True, 4)"),
        ((1, 2, 3), 0.5, 0, ValueError, "(B, Hq, Nq, Nk); got (1, 2, 3)"),
        ((1, 2, -3, 4), 0.5, 0, ValueError, "(B, Hq, Nq, Nk); got (1, 2, -3, 4)"),
        (SHAPE, "half", 0, TypeError, "dropout_p must be a number from 0 up to, but not including"),
        (SHAPE, True, 0, TypeError, "but not including, 1; got True"),
        (SHAPE, 1.0, 0, ValueError, "but not including, 1; got 1.0"),
        (SHAPE, -0.1, 0, ValueError, "but not including, 1; got -0.1"),
        (SHAPE, float("nan"), 0, ValueError, "but not including, 1; got nan"),
        (SHAPE, 0.5, 1.0, TypeError, "seed must be an integer from 0 to 2**64 - 1; got 1.0"),
        (SHAPE, 0.5, -1, ValueError, "seed must be an integer from 0 to 2**64 - 1; got -1"),
        (SHAPE, 0.5, 2**64, ValueError, "seed must be an integer from 0 to 2**64 - 1; got 1844674"),
    ],
)
def test_bad_arguments(shape: Any, p: Any, seed: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        dropout_mask(shape, p, seed)
