"""How the traffic grows with N, D, M and the density of blocks: the theorems, in numbers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tileattn.algorithm.tiles import sizes_for_memory
from tileattn.call.parse import parse
from tileattn.call.problem import Problem
from tileattn.traffic import KINDS, modelled

every_kind = pytest.mark.parametrize("kind", KINDS)


# Arrays of N x D that FlashAttention moves for each key block, and once; numbers of each query
# that it moves for each key block, and once.
MOVED = {"forward": (3, 3, 4, 2), "backward": (5, 5, 2, 0)}


def problem_of(N: int, D: int) -> Problem:
    x = np.broadcast_to(np.zeros((), np.float32), (1, 1, N, D))
    return parse(x, x, x, {})[0]


def ratios(
    points: Iterable[tuple[Any, ...]],
    elements: Callable[..., int],
    formula: Callable[..., float],
) -> tuple[float, float]:
    """Smallest and largest ratio of a count to a formula."""
    found = [elements(*point) / formula(*point) for point in points]
    return min(found), max(found)


def flash(kind: str) -> Callable[..., int]:
    """Elements that FlashAttention moves with the blocks of its paper."""

    def elements(N: int, D: int, M: int, density: float | None = None) -> int:
        tile = sizes_for_memory(M, D)
        return modelled(problem_of(N, D), tile, "flash1", kind, density).elements

    return elements


def exponent(values: Sequence[int], counts: Sequence[int]) -> float:
    """Slope of the line through the points, both axes logarithmic."""
    return float(np.polyfit(np.log(values), np.log(counts), 1)[0])


LENGTHS = [1 << n for n in range(10, 18)]
WIDTHS = [16, 32, 64, 128, 256]

# From one row in fast memory up to all of q; at N D / 4 one block holds all keys.
MEMORIES = [
    (N, D, M)
    for N in LENGTHS
    for D in WIDTHS
    for M in (1 << n for n in range(4, 26))
    if D <= M <= N * D
]


@every_kind
def test_standard_attention_is_linear_in_d_and_quadratic_in_n(kind: str) -> None:
    def elements(N: int, D: int) -> int:
        return modelled(problem_of(N, D), (1, 1), "standard", kind).elements

    points = [(N, D) for N in LENGTHS for D in (*WIDTHS, 4096)]
    low, high = ratios(points, elements, lambda N, D: N * D + N * N)
    arrays, matrices = {"forward": (4, 4), "backward": (8, 7)}[kind]
    assert min(arrays, matrices) <= low <= high <= max(arrays, matrices)


@every_kind
def test_flash_attention_is_within_constants_of_its_theorem(kind: str) -> None:
    """Theorem 2: N**2 D**2 / M, up to constants that hold over the whole range.

    A key block has M / 4 D keys, so that there are four times N D / M, or M / D times at the lower
    end, where it cannot have less than one. What moves once counts most at the upper end.
    """
    arrays, once, numbers, numbers_once = MOVED[kind]
    low, high = ratios(MEMORIES, flash(kind), lambda N, D, M: N * N * D * D / M)
    most = 4 * (arrays + numbers / min(WIDTHS)) + once + numbers_once / min(WIDTHS)
    assert arrays <= low <= high <= most


@every_kind
def test_the_exponents_of_flash_attention(kind: str) -> None:
    """Away from M = N D, where q, k, v and out themselves are all that moves.

    What moves once, and the numbers of each query, bend the lines: the slopes of this range differ
    from the theorem's by up to 0.05 in D, where the numbers of a query count most at D = 16.
    """
    elements = flash(kind)
    N, D, M = 1 << 16, 64, 1 << 14
    by_length = exponent(LENGTHS[2:], [elements(n, D, M) for n in LENGTHS[2:]])
    assert by_length == pytest.approx(2, abs=0.02)
    memories = [1 << n for n in range(8, 18)]
    by_memory = exponent(memories, [elements(N, D, m) for m in memories])
    assert by_memory == pytest.approx(-1, abs=0.02)
    widths = [16, 32, 64, 128]
    assert exponent(widths, [elements(N, d, M) for d in widths]) == pytest.approx(2, abs=0.05)


@every_kind
def test_block_sparse_attention_is_within_constants_of_its_proposition(kind: str) -> None:
    """Proposition 4: N D + N**2 D**2 s / M, for blocks of density s."""
    arrays, once, numbers, _ = MOVED[kind]
    points = [(*point, s) for point in MEMORIES for s in (1.0, 0.5, 0.1, 0.01, 0.001)]
    low, high = ratios(points, flash(kind), lambda N, D, M, s: N * D + N * N * D * D * s / M)
    assert min(arrays, once) <= low <= high <= 4 * (arrays + numbers / min(WIDTHS))


@every_kind
def test_more_memory_never_moves_more(kind: str) -> None:
    moved = [flash(kind)(4096, 64, M) for M in range(64, 4096 * 64, 997)]
    assert moved == sorted(moved, reverse=True)
