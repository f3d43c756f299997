"""What hidden entries hold does not matter, and what skipped blocks hold is not even read."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tests.conftest import Runner
from tileattn import BlockMask, reference
from tileattn.blocks import Tile
from tileattn.testing import assert_attention_close, error_bound

pytestmark = pytest.mark.usefixtures("one_blas_thread")

Array = NDArray[Any]

B, HQ, HKV, D, DV = 2, 4, 2, 8, 12
SHORT, LONG = (37, 29), (270, 300)
WRONG = [math.nan, math.inf, -math.inf]


def arrays(lengths: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    Nq, Nk = lengths
    rng = np.random.default_rng(0)
    shapes = ((B, HQ, Nq, D), (B, HKV, Nk, D), (B, HKV, Nk, DV), (B, HQ, Nq, DV))
    q, k, v, dout = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return q, k, v, dout


def masks(lengths: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Masks of every kind; each leaves some keys unseen, or some queries blind, or both."""
    Nq, Nk = lengths
    rng = np.random.default_rng(1)
    dense = rng.random((HQ, Nq, Nk)) < 0.5
    dense[:, 3:9] = False
    dense[:, :, 7:20] = False
    blocks = rng.random((B, HQ, -(-Nq // 8), -(-Nk // 5))) < 0.5
    blocks[:, :, 1] = False
    blocks[..., 2] = False
    partly = np.random.default_rng(2).random((Nq, Nk)) < 0.5
    partly[:, 11:13] = False
    return {
        "causal": {"causal": True, "q_offset": -5},
        "window": {"window": (3, 2), "q_offset": [-9, Nk - Nq // 2]},
        "lengths": {"kv_lengths": [Nk // 2, Nk - 3]},
        "no length": {"kv_lengths": [0, 4], "causal": True},
        "mask": {"mask": dense},
        "mask of keys": {"mask": np.arange(Nk) % 3 > 0},
        "mask of queries": {"mask": np.arange(Nq)[:, None] % 4 > 0},
        "block mask": {"block_mask": BlockMask(blocks, (8, 5))},
        "mixed blocks": {"block_mask": BlockMask.from_mask(partly, (8, 5))},
        "all": {
            "mask": dense,
            "kv_lengths": [Nk, Nk - 6],
            "window": (Nk // 2, None),
            "softcap": 2.0,
            "bias": rng.normal(size=(HQ, 1, Nk)).astype(np.float32),
            "dropout_p": 0.2,
        },
    }


@pytest.mark.parametrize("kind", masks(SHORT))
@pytest.mark.parametrize("wrong", WRONG)
def test_no_bit_depends_on_what_nobody_sees(runner: Runner, kind: str, wrong: float) -> None:
    check_hidden(runner, SHORT, kind, wrong)


@pytest.mark.parametrize("kind", ["causal", "window", "lengths", "mixed blocks", "all"])
def test_no_bit_of_long_problems_either(backend: Runner, kind: str) -> None:
    """Long enough for several tiles, and for the norms to be looked at."""
    check_hidden(backend, LONG, kind, math.nan)


def check_hidden(runner: Runner, lengths: tuple[int, int], kind: str, wrong: float) -> None:
    options = masks(lengths)[kind]
    q, k, v, dout = arrays(lengths)
    expected = runner.forward(q, k, v, **options)
    of_expected = runner.backward(dout, q, k, v, *expected, **options)
    visible = reference.visibility((B, HQ, *lengths), options)
    unseen = ~visible.any(axis=2).reshape(B, HKV, -1, lengths[1]).any(axis=2)
    blind = ~visible.any(axis=3)
    assert unseen.any() or blind.any()
    k[unseen] = v[unseen] = q[blind] = dout[blind] = wrong
    result = runner.forward(q, k, v, **options)
    grads = runner.backward(dout, q, k, v, *result, **options)
    for ours, theirs in zip((*result, *grads), (*expected, *of_expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert not result.out[blind].any()
    assert np.isneginf(result.lse[blind]).all()
    assert not grads.dq[blind].any()
    assert not grads.dk[unseen].any()
    assert not grads.dv[unseen].any()


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("kind", ["causal", "mask", "block mask", "all"])
def test_what_other_rows_see_does_not_reach_a_row(
    runner: Runner, kind: str, where: str, wrong: float
) -> None:
    check_reach(runner, SHORT, kind, where, wrong)


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("kind", ["causal", "block mask"])
def test_nor_does_it_in_long_problems(backend: Runner, kind: str, where: str) -> None:
    check_reach(backend, LONG, kind, where, math.nan)


def check_reach(
    runner: Runner, lengths: tuple[int, int], kind: str, where: str, wrong: float
) -> None:
    q, k, v, dout = arrays(lengths)
    options = masks(lengths)[kind]
    bounds = error_bound(q, k, v, dout, **options)
    expected = reference.forward(q, k, v, **options)
    of_expected = reference.backward(dout, q, k, v, **options)
    clean = runner.backward(dout, q, k, v, *runner.forward(q, k, v, **options), **options)
    visible = reference.visibility((B, HQ, *lengths), options)
    j = int(np.argmax(visible[1, 2].any(axis=0)))
    {"k": k, "v": v}[where][1, 1, j, 3] = wrong
    reached = np.zeros(visible.shape[:3], bool)
    reached[1, 2:] = visible[1, 2:, :, j]
    assert reached.any()
    assert (visible.any(axis=3) & ~reached).any()
    result = runner.forward(q, k, v, **options)
    grads = runner.backward(dout, q, k, v, *result, **options)
    for x, truth in zip((*result, grads.dq), (*expected, of_expected.dq), strict=True):
        x[reached] = truth[reached]  # what may differ
    assert_attention_close(result, expected, bounds)
    assert_attention_close(grads, of_expected, bounds, names=("dq",))
    for ours, theirs in ((grads.dk, clean.dk), (grads.dv, clean.dv)):
        others = np.ones(ours.shape[:2], bool)
        others[1, 1] = False
        np.testing.assert_array_equal(ours[others], theirs[others])


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}], ids=str)
def test_what_is_seen_propagates_as_in_the_plain_formula(
    runner: Runner, where: str, wrong: float, options: dict[str, Any]
) -> None:
    """A NaN stands exactly where the oracle has one, and so do the infinities of both outputs.

    In the gradients ``inf - inf`` and ``0 * inf`` depend on the order of operations: there, what
    the oracle has not finite is not finite.
    """
    q, k, v, dout = arrays(SHORT)
    {"q": q, "k": k, "v": v, "dout": dout}[where][0, 1, 21, 2] = wrong
    bounds = error_bound(q, k, v, dout, **options)
    result = runner.forward(q, k, v, **options)
    assert_attention_close(result, reference.forward(q, k, v, **options), bounds)
    grads = runner.backward(dout, q, k, v, *result, **options)
    expected = reference.backward(dout, q, k, v, **options)
    if math.isnan(wrong):
        assert_attention_close(grads, expected, bounds)
        return
    for name in ("dq", "dk", "dv"):
        ours, theirs = np.isfinite(getattr(grads, name)), np.isfinite(getattr(expected, name))
        assert not (ours & ~theirs).any()
        assert ours[1].all()


def test_a_sink_of_minus_infinity_has_no_gradient(runner: Runner) -> None:
    """Not even where a NaN that its head sees is in ``delta``."""
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
    """Every tile that the specification computes lies in blocks that are seen, and holds them."""
    q, k, v, dout = (x[:1, :1] for x in arrays(lengths))
    blocks = np.random.default_rng(1).random((-(-lengths[0] // 8), -(-lengths[1] // 5))) < 0.4
    options = {**options, "block_mask": BlockMask(blocks, (8, 5))}
    seen = reference.visibility((1, 1, *lengths), options)[0, 0]
    in_blocks = options["block_mask"].to_dense((1, 1, *lengths))[0, 0]
    absorb, back = tileattn.spec.absorb_tile, tileattn.spec.backward_tile
    forward_tiles: list[Tile] = []
    backward_tiles: list[Tile] = []

    def absorbing(*args: Any) -> Any:
        forward_tiles.append(args[4])
        return absorb(*args)

    def going_back(*args: Any) -> Any:
        backward_tiles.append(args[3])
        return back(*args)

    monkeypatch.setattr("tileattn.spec.absorb_tile", absorbing)
    monkeypatch.setattr("tileattn.spec.backward_tile", going_back)
    result = tileattn.forward(q, k, v, **options)
    tileattn.backward(dout, q, k, v, *result, **options)
    for tiles in (forward_tiles, backward_tiles):
        pairs = covered(tiles, lengths)
        assert not (pairs & ~in_blocks).any()
        assert not (seen & ~pairs).any()
    assert in_blocks.mean() < 0.6


def test_skipped_keys_and_values_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys 40 to 79 are skipped by every query: no block that is loaded overlaps them."""
    q, k, v = (np.ascontiguousarray(x[:1, :1]) for x in arrays(LONG)[:3])
    blocks = np.ones((-(-270 // 10), 30), bool)
    blocks[:, 4:8] = False
    mask = BlockMask(blocks, (10, 10))
    load = tileattn.lane.load
    loaded: list[Array] = []

    def loading(x: Array, *args: Any) -> Array:
        loaded.append(x)
        return load(x, *args)

    monkeypatch.setattr("tileattn.spec.load", loading)
    tileattn.forward(q, k, v, block_mask=mask)
    skipped = (k[..., 40:80, :], v[..., 40:80, :])
    assert not any(np.shares_memory(x, part) for x in loaded for part in skipped)
    for part in (k[..., :40, :], k[..., 80:, :], v[..., :40, :], v[..., 80:, :]):
        assert any(np.shares_memory(x, part) for x in loaded)


def test_a_query_whose_scores_are_all_minus_infinity_has_no_gradient() -> None:
    """Its products overflow, and no mask hides them: a probability is 0, not exp(-inf + inf)."""
    q, k, v, dout = arrays((5, 7))
    q[..., 0], k[..., 0] = 0, 1e9
    options: dict[str, Any] = {"mask": np.arange(5)[:, None] > 0}
    hidden = tileattn.forward(q, k, v, **options)
    expected = tileattn.backward(dout, q, k, v, *hidden, **options)
    q[:, :, 0, 0] = -1e38
    saved = tileattn.forward(q, k, v)
    grads = tileattn.backward(dout, q, k, v, *saved)
    for ours, theirs in zip((*saved, *grads[:3]), (*hidden, *expected[:3]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
