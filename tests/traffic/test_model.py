"""The closed forms against counts over the schedule, and both against counts by hand."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tileattn import BlockMask
from tileattn.call.parse import parse
from tileattn.call.problem import Operands, Problem
from tileattn.oracle.dense import visibility
from tileattn.traffic import ALGORITHMS, KINDS, Traffic, counted, flops, modelled

EVERY = [(algorithm, kind) for algorithm in ALGORITHMS for kind in KINDS]

lengths = st.integers(0, 60)
sides = st.none() | st.integers(0, 70)
tiles = st.tuples(st.integers(1, 64), st.integers(1, 64))


def call(
    heads: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    options: dict[str, Any] | None = None,
    dtype: Any = np.float32,
) -> tuple[Problem, Operands]:
    """Make a call of these sizes; nothing of it takes memory."""
    (B, Hq, Hkv), (Nq, Nk, D, Dv) = heads, sizes
    shapes = (B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv)
    q, k, v = (np.broadcast_to(np.zeros((), dtype), shape) for shape in shapes)
    return parse(q, k, v, options or {})


# --- closed form and schedule -------------------------------------------------------------------


@settings(max_examples=300)
@given(
    heads=st.sampled_from([(1, 1, 1), (2, 6, 2), (1, 6, 1), (3, 0, 0)]),
    sizes=st.tuples(lengths, lengths, st.integers(0, 9), st.integers(0, 9)),
    window=st.none() | st.tuples(sides, sides),
    causal=st.booleans(),
    tile=tiles,
    heads_per_load=st.integers(1, 7),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_the_closed_form_is_the_count(
    heads: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    window: tuple[int | None, int | None] | None,
    causal: bool,
    tile: tuple[int, int],
    heads_per_load: int,
    dtype: Any,
) -> None:
    problem, operands = call(heads, sizes, {"window": window, "causal": causal}, dtype)
    for which in EVERY:
        model = modelled(problem, tile, *which, heads_per_load=heads_per_load)
        assert model == counted(problem, operands, tile, *which, heads_per_load)


@settings(max_examples=50)
@given(
    counts=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    tile=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    density=st.floats(0, 1),
    by_head=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_density_stands_for_a_block_mask(
    counts: tuple[int, int], tile: tuple[int, int], density: float, by_head: bool, seed: int
) -> None:
    """Blocks of the mask are the tile; one query block attends to all keys, which are loaded."""
    rng = np.random.default_rng(seed)
    blocks = rng.random((2, 4 if by_head else 1, *counts)) < density
    blocks[:, :, rng.integers(counts[0])] = True
    options = {"block_mask": BlockMask(blocks, tile)}
    sizes = (counts[0] * tile[0], counts[1] * tile[1], 3, 5)
    problem, operands = call((2, 4, 2), sizes, options)
    densities: list[Any] = [float(blocks.mean()), Fraction(int(blocks.sum()), blocks.size)]
    for d in densities:
        for which in EVERY:
            assert modelled(problem, tile, *which, d) == counted(problem, operands, tile, *which)


def test_no_block_at_all() -> None:
    options = {"block_mask": BlockMask(np.zeros((2, 2), bool), (8, 8))}
    problem, operands = call((1, 2, 1), (16, 16, 3, 5), options)
    for which in EVERY:
        assert modelled(problem, (8, 8), *which, 0) == counted(problem, operands, (8, 8), *which)
    assert counted(problem, operands, (8, 8), "flash2", "backward").writes["dk"] == 2 * 16 * 3


def test_a_tall_tile_on_a_boundary_loads_its_keys_for_each_half() -> None:
    problem, operands = call((1, 1, 1), (600, 600, 8, 8), {"causal": True})
    model, walk = (
        modelled(problem, (300, 100)).reads["k"],
        counted(problem, operands, (300, 100)).reads["k"],
    )
    assert model < walk <= model + 2 * 300 * 8


def test_heads_with_other_empty_blocks_share_loads() -> None:
    """Four heads of one group, each of which attends to one of four key blocks, in turn."""
    blocks = np.eye(4, dtype=bool)[:, None]
    options = {"block_mask": BlockMask(blocks, (8, 8))}
    problem, operands = call((1, 4, 1), (8, 32, 1, 1), options)
    for heads_per_load, held in ((1, 4 * 8), (2, 4 * 8), (4, 4 * 8)):
        of = counted(problem, operands, (8, 8), "flash2", "backward", heads_per_load)
        assert of.reads["k"] == held
        assert of.writes["dk"] == 4 // heads_per_load * 32
    together = {"block_mask": BlockMask(np.eye(1, 4, dtype=bool), (8, 8))}
    problem, operands = call((1, 4, 1), (8, 32, 1, 1), together)
    for heads_per_load, loads in ((1, 4), (2, 2), (3, 2), (4, 1), (9, 1)):
        for kind in KINDS:
            of = counted(problem, operands, (8, 8), "flash2", kind, heads_per_load)
            assert of.reads["k"] == loads * 8


# --- by hand ------------------------------------------------------------------------------------

Nq, Nk, D, Dv = 6, 10, 3, 5
S = Nq * Nk
Q, K, V, OUT = Nq * D, Nk * D, Nk * Dv, Nq * Dv

BY_HAND = {
    ("standard", "forward"): (
        {"q": Q, "k": K, "s": S, "p": S, "v": V},
        {"s": S, "p": S, "out": OUT},
    ),
    ("standard", "backward"): (
        {"p": 2 * S, "dout": 2 * OUT, "v": V, "dp": S, "ds": 2 * S, "k": K, "q": Q},
        {"dv": V, "dp": S, "ds": S, "dq": Q, "dk": K},
    ),
    ("flash1", "forward"): (
        {"q": 3 * Q, "k": K, "v": V, "out": 3 * OUT, "l": 3 * Nq, "m": 3 * Nq},
        {"out": 4 * OUT, "l": 4 * Nq, "m": 4 * Nq},
    ),
    ("flash1", "backward"): (
        {"q": 3 * Q, "k": K, "v": V, "out": 3 * OUT, "dout": 3 * OUT, "dq": 3 * Q}
        | {"l": 3 * Nq, "m": 3 * Nq},
        {"dq": 4 * Q, "dk": K, "dv": V},
    ),
    ("flash2", "forward"): ({"q": Q, "k": 2 * K, "v": 2 * V}, {"out": OUT, "lse": Nq}),
    ("flash2", "backward"): (
        {"q": 3 * Q, "k": K, "v": V, "out": OUT, "dout": 4 * OUT, "dq": 3 * Q}
        | {"lse": 3 * Nq, "delta": 3 * Nq},
        {"delta": Nq, "dq": 4 * Q, "dk": K, "dv": V},
    ),
}


@pytest.mark.parametrize("which", EVERY, ids=" ".join)
def test_dense_attention_by_hand(which: tuple[str, str]) -> None:
    """Two blocks of queries and three of keys, one head."""
    problem, operands = call((1, 1, 1), (Nq, Nk, D, Dv))
    found = counted(problem, operands, (4, 4), *which)
    assert (found.reads, found.writes) == BY_HAND[which]
    assert found.sizes == dict.fromkeys({**found.reads, **found.writes}, 4)
    assert found.elements == sum(sum(rows.values()) for rows in BY_HAND[which])
    assert found.nbytes == 4 * found.elements == sum(found.moved.values())


@pytest.mark.parametrize("which", EVERY, ids=" ".join)
def test_sums_have_the_size_of_their_dtype(which: tuple[str, str]) -> None:
    problem, _ = call((1, 1, 1), (Nq, Nk, D, Dv), dtype=np.float16)
    sums = {name for name, size in modelled(problem, (4, 4), *which).sizes.items() if size == 4}
    assert sums == {
        ("flash1", "forward"): {"out", "l", "m"},
        ("flash1", "backward"): {"dq", "l", "m"},
        ("flash2", "forward"): {"lse"},
        ("flash2", "backward"): {"dq", "lse", "delta"},
    }.get(which, set())


def test_bytes_of_one_array() -> None:
    traffic = Traffic({"q": 3, "dq": 2}, {"dq": 5}, {"q": 2, "dq": 4})
    assert traffic.moved == {"q": 6, "dq": 28}
    assert (traffic.elements, traffic.nbytes) == (10, 34)


def test_standard_attention_skips_nothing() -> None:
    for kind in KINDS:
        dense, causal = (
            modelled(call((1, 2, 1), (33, 33, 4, 4), options)[0], (8, 8), "standard", kind)
            for options in ({}, {"causal": True})
        )
        assert dense == causal


# --- FLOPs ---------------------------------------------------------------------------------


@settings(max_examples=50)
@given(lengths, lengths, sides, sides)
def test_flops_are_those_of_the_visible_pairs(
    Nq: int, Nk: int, left: int | None, right: int | None
) -> None:
    problem, _ = call((2, 4, 2), (Nq, Nk, 3, 5), {"window": (left, right)})
    pairs = visibility((2, 4, Nq, Nk), {"window": (left, right)}).sum()
    assert flops(problem) == 2 * pairs * (3 + 5)
    assert flops(problem, "backward") == 2 * pairs * (3 * 3 + 2 * 5)


def test_flops_of_square_heads() -> None:
    problem, _ = call((2, 4, 2), (30, 50, 8, 8))
    assert flops(problem) == 4 * 2 * 4 * 30 * 50 * 8
    assert flops(problem, "backward") == 2.5 * flops(problem)
    assert flops(problem, density=0.25) == flops(problem) / 4


def test_the_standard_algorithm_skips_and_recomputes_nothing() -> None:
    problem, _ = call((2, 4, 2), (30, 50, 3, 5), {"causal": True})
    assert flops(problem, algorithm="standard") == 2 * 2 * 4 * 30 * 50 * (3 + 5)
    assert flops(problem, "backward", algorithm="standard") == 4 * 2 * 4 * 30 * 50 * (3 + 5)
    assert flops(problem, algorithm="flash1") == flops(problem)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"algorithm": "flash3"},
            r"algorithm must be one of standard, flash1, flash2; got 'flash3'",
        ),
        ({"kind": "sideways"}, r"kind must be one of forward, backward; got 'sideways'"),
        ({"tile": (0, 4)}, r"tile must be \(queries, keys\), 1 or more each; got \(0, 4\)"),
        ({"heads_per_load": 0}, r"heads_per_load must be 1 or more; got 0"),
        ({"density": 1.5}, r"density must be a number from 0 to 1; got 1.5"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], message: str) -> None:
    problem, operands = call((1, 1, 1), (8, 8, 4, 4))
    with pytest.raises(ValueError, match=f"^{message}$"):
        modelled(problem, **{"tile": (4, 4), **wrong})
    if "density" not in wrong:
        with pytest.raises(ValueError, match=f"^{message}$"):
            counted(problem, operands, **{"tile": (4, 4), **wrong})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_lengths": [3]}, r"the traffic of kv_lengths; use counted\(\), which reads"),
        ({"q_offset": [3]}, r"sizes do not determine the traffic of q_offset"),
        ({"block_mask": BlockMask(np.ones((1, 1), bool))}, r"pass density= for a block mask$"),
    ],
    ids=["kv_lengths", "q_offset", "block_mask"],
)
def test_what_sizes_do_not_tell_is_refused(options: dict[str, Any], message: str) -> None:
    problem, operands = call((1, 1, 1), (8, 8, 4, 4), options)
    for refused in (lambda: modelled(problem, (4, 4)), lambda: flops(problem)):
        with pytest.raises(ValueError, match=message):
            refused()
    assert counted(problem, operands, (4, 4)).reads["q"] == 32
