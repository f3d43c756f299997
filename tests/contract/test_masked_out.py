"""Values of masked-out entries do not matter, and those of empty blocks are never read."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import tileattn
from tests.conftest import Runner
from tests.nonfinite import (
    WRONG,
    arrays,
    check_masked_out,
    check_reach,
    check_spoiled,
    check_visible,
    masks,
)
from tileattn import BlockMask
from tileattn.algorithm import spec
from tileattn.algorithm.tiles import Tile
from tileattn.backends.numpy.memory import TileMemory
from tileattn.oracle.dense import visibility

pytestmark = pytest.mark.usefixtures("one_blas_thread")

Array = NDArray[Any]

SHORT, LONG = (37, 29), (270, 300)


@pytest.mark.parametrize("kind", masks(SHORT))
@pytest.mark.parametrize("wrong", WRONG)
def test_no_bit_depends_on_masked_out_entries(runner: Runner, kind: str, wrong: float) -> None:
    check_masked_out(runner, arrays(SHORT), masks(SHORT)[kind], wrong)


@pytest.mark.parametrize("kind", ["causal", "window", "lengths", "mixed blocks", "all"])
def test_no_bit_of_long_problems_either(backend: Runner, kind: str) -> None:
    """Long enough for several tiles, and for the norms to be looked at."""
    check_masked_out(backend, arrays(LONG), masks(LONG)[kind], math.nan)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("kind", ["causal", "mask", "block mask", "all"])
def test_values_of_other_rows_do_not_reach_a_row(
    runner: Runner, kind: str, where: str, wrong: float
) -> None:
    check_reach(runner, arrays(SHORT), masks(SHORT)[kind], where, wrong)


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("kind", ["causal", "block mask"])
def test_nor_do_they_in_long_problems(backend: Runner, kind: str, where: str) -> None:
    check_reach(backend, arrays(LONG), masks(LONG)[kind], where, math.nan)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}], ids=str)
def test_non_finite_values_propagate_as_in_the_formula(
    runner: Runner, where: str, wrong: float, options: dict[str, Any]
) -> None:
    q, k, v, dout = arrays(SHORT)
    {"q": q, "k": k, "v": v, "dout": dout}[where][0, 1, 21, 2] = wrong
    _, grads = check_visible(runner, (q, k, v, dout), options)
    assert all(np.isfinite(x[1]).all() for x in grads[:3])


@pytest.mark.parametrize("names", [("q", "k"), ("v", "dout")], ids=str)
@pytest.mark.parametrize("kind", masks(SHORT))
@given(seed=st.integers(0, 1 << 20))
@settings(max_examples=3)  # of each mask and each pair of arrays
def test_random_non_finite_values_propagate_as_in_the_formula(
    runner: Runner, kind: str, names: tuple[str, ...], seed: int
) -> None:
    """Not in keys and values at once: a score of -inf beside an infinite value is ``0 * inf``."""
    rng = np.random.default_rng(seed)
    check_spoiled(runner, arrays(SHORT), masks(SHORT)[kind], rng, names=names)


def test_a_sink_of_minus_infinity_has_no_gradient(runner: Runner) -> None:
    """Not even where a NaN that its head attends to is in ``delta``."""
    q, k, v, dout = arrays(SHORT)
    v[0, 0, 3, 3] = math.nan
    sinks = np.array([-math.inf, 0.5, -math.inf, -1.0], np.float32)
    result = runner.forward(q, k, v, sinks=sinks)
    dsinks = runner.backward(dout, q, k, v, *result, sinks=sinks).dsinks
    np.testing.assert_array_equal(dsinks[[0, 2]], [0, 0])
    assert np.isnan(dsinks[1])
    assert np.isfinite(dsinks[3])
    assert dsinks[3] != 0


# --- skipped blocks -----------------------------------------------------------------------------


def covered(tiles: list[Tile], lengths: tuple[int, int]) -> NDArray[np.bool_]:
    pairs = np.zeros(lengths, bool)
    for tile in tiles:
        pairs[tile.queries, tile.keys] = True
    return pairs


@pytest.mark.parametrize("lengths", [SHORT, LONG])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_skipped_blocks_are_not_computed(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], options: dict[str, Any]
) -> None:
    """Every tile that the specification computes lies in visible blocks, and covers them."""
    q, k, v, dout = (x[:1, :1] for x in arrays(lengths))
    blocks = np.random.default_rng(1).random((-(-lengths[0] // 8), -(-lengths[1] // 5))) < 0.4
    options = {**options, "block_mask": BlockMask(blocks, (8, 5))}
    visible = visibility((1, 1, *lengths), options)[0, 0]
    in_blocks = options["block_mask"].to_dense((1, 1, *lengths))[0, 0]
    update, back = spec.update_tile, spec.backward_tile
    forward_tiles: list[Tile] = []
    backward_tiles: list[Tile] = []

    def updating(*args: Any) -> Any:
        forward_tiles.append(args[5])
        return update(*args)

    def going_back(*args: Any) -> Any:
        backward_tiles.append(args[3])
        return back(*args)

    monkeypatch.setattr(spec, "update_tile", updating)
    monkeypatch.setattr(spec, "backward_tile", going_back)
    result = tileattn.forward(q, k, v, backend="numpy", **options)
    tileattn.backward(dout, q, k, v, *result, backend="numpy", **options)
    for tiles in (forward_tiles, backward_tiles):
        pairs = covered(tiles, lengths)
        assert not (pairs & ~in_blocks).any()
        assert not (visible & ~pairs).any()
    assert in_blocks.mean() < 0.6


def test_skipped_keys_and_values_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys 40 to 79 are skipped by every query: no block that is loaded overlaps them."""
    q, k, v = (np.ascontiguousarray(x[:1, :1]) for x in arrays(LONG)[:3])
    blocks = np.ones((-(-270 // 10), 30), bool)
    blocks[:, 4:8] = False
    mask = BlockMask(blocks, (10, 10))
    load = TileMemory.load
    loaded: list[Array] = []

    def loading(memory: TileMemory, name: str, x: Array, scale: float | None = None) -> Array:
        loaded.append(x)
        return load(memory, name, x, scale)

    monkeypatch.setattr(TileMemory, "load", loading)
    tileattn.forward(q, k, v, block_mask=mask, backend="numpy")
    skipped = (k[..., 40:80, :], v[..., 40:80, :])
    assert not any(np.shares_memory(x, part) for x in loaded for part in skipped)
    for part in (k[..., :40, :], k[..., 80:, :], v[..., :40, :], v[..., 80:, :]):
        assert any(np.shares_memory(x, part) for x in loaded)


@pytest.mark.usefixtures("cpu_backend")
def test_a_query_whose_scores_are_all_minus_infinity_has_no_gradient() -> None:
    """Its products overflow, and no mask applies: a probability is 0, not exp(-inf + inf)."""
    q, k, v, dout = arrays((5, 7))
    q[..., 0], k[..., 0] = 0, 1e9
    options: dict[str, Any] = {"mask": np.arange(5)[:, None] > 0}
    masked = tileattn.forward(q, k, v, **options)
    expected = tileattn.backward(dout, q, k, v, *masked, **options)
    q[:, :, 0, 0] = -1e38
    saved = tileattn.forward(q, k, v)
    grads = tileattn.backward(dout, q, k, v, *saved)
    for ours, theirs in zip((*saved, *grads[:3]), (*masked, *expected[:3]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
