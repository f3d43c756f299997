"""Block masks: three ways to make one, what is classified, and what is refused."""

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import tileattn
from tileattn import BlockMask
from tileattn.call.block_mask import EMPTY, FULL, PARTIAL

Bools = NDArray[np.bool_]

B, HQ, NQ, NK = 2, 3, 13, 10
SHAPE = (B, HQ, NQ, NK)


def rule(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Slide a window with the head; mask out the last keys of batch entry 1."""
    return (abs(i - j - h) <= 2) & ((b == 0) | (j < 6))


def dense() -> Bools:
    b, h, i, j = np.ogrid[:B, :HQ, :NQ, :NK]
    visible: Bools = rule(b, h, i, j)
    return visible


def by_blocks(visible: Bools, size: tuple[int, int]) -> NDArray[np.int8]:
    """Classify every block by looking at all of its pairs."""
    bq, bk = size
    Nq, Nk = visible.shape[2:]
    kinds = np.zeros((*visible.shape[:2], -(-Nq // bq), -(-Nk // bk)), np.int8)
    for b, h, a, c in np.ndindex(kinds.shape):
        part = visible[b, h, a * bq : (a + 1) * bq, c * bk : (c + 1) * bk]
        kinds[b, h, a, c] = FULL if part.all() else PARTIAL if part.any() else EMPTY
    return kinds


# --- three ways to make one ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (4, 3), (5, 7), (13, 10), (16, 128), (128, 128)])
def test_mask_and_predicate_agree(size: tuple[int, int]) -> None:
    visible = dense()
    for mask in (BlockMask.from_mask(visible, size), BlockMask.from_predicate(rule, SHAPE, size)):
        np.testing.assert_array_equal(mask.kinds, by_blocks(visible, size))
        np.testing.assert_array_equal(mask.to_dense(SHAPE), visible)
        assert mask.density == np.mean(mask.kinds != EMPTY)


@given(st.data())
def test_whole_blocks_are_a_mask_of_repeated_entries(data: st.DataObject) -> None:
    size = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    blocks = rng.random((B, HQ, -(-NQ // size[0]), -(-NK // size[1]))) < 0.5
    mask = BlockMask(blocks, size)
    expected = blocks.repeat(size[0], axis=2).repeat(size[1], axis=3)[:, :, :NQ, :NK]
    np.testing.assert_array_equal(mask.to_dense(SHAPE), expected)
    np.testing.assert_array_equal(BlockMask.from_mask(expected, size).kinds, mask.kinds)
    assert mask.density == blocks.mean()


def test_the_default_block_size() -> None:
    assert BlockMask(np.ones((2, 3), bool)).block_size == (128, 128)
    assert BlockMask.from_mask(np.ones((200, 300), bool)).kinds.shape == (1, 1, 2, 3)


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_leading_axes_broadcast(ndim: int) -> None:
    blocks = np.random.default_rng(0).random((B, HQ, 4, 4))[(0,) * (4 - ndim)] < 0.5
    whole = np.broadcast_to(blocks, (B, HQ, 4, 4))
    expected = BlockMask(whole, (4, 3)).to_dense(SHAPE)
    np.testing.assert_array_equal(BlockMask(blocks, (4, 3)).to_dense(SHAPE), expected)
    part = expected[(0,) * (4 - ndim)]
    np.testing.assert_array_equal(BlockMask.from_mask(part, (4, 3)).to_dense(SHAPE), expected)


@pytest.mark.parametrize("lead", [(1, HQ), (B, 1), (1, 1), (0, HQ), (B, 0)])
def test_short_and_empty_leading_axes(lead: tuple[int, int]) -> None:
    mask = BlockMask.from_predicate(rule, (*lead, NQ, NK), (4, 3))
    shape = (lead[0] if lead[0] != 1 else B, lead[1] if lead[1] != 1 else HQ, NQ, NK)
    b, h, i, j = np.ogrid[: lead[0], : lead[1], :NQ, :NK]
    np.testing.assert_array_equal(mask.to_dense(shape), np.broadcast_to(rule(b, h, i, j), shape))


@pytest.mark.parametrize("shape", [(B, HQ, 0, NK), (B, HQ, NQ, 0), (0, 0, 0, 0)])
def test_a_mask_of_nothing(shape: tuple[int, int, int, int]) -> None:
    mask = BlockMask.from_predicate(rule, shape, (4, 3))
    assert mask.density == 0.0
    assert mask.to_dense(shape).shape == shape


def test_long_masks_are_classified_strip_by_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tileattn.call.block_mask._STRIP", 100)
    mask = BlockMask.from_predicate(rule, SHAPE, (4, 3))
    np.testing.assert_array_equal(mask.kinds, by_blocks(dense(), (4, 3)))


# --- kinds and pairs ----------------------------------------------------------------------------


@given(st.integers(0, NQ - 1), st.integers(0, NK - 1), st.data())
def test_kind_of_any_tile(q0: int, k0: int, data: st.DataObject) -> None:
    q1, k1 = data.draw(st.integers(q0 + 1, NQ)), data.draw(st.integers(k0 + 1, NK))
    heads = data.draw(st.sampled_from([slice(0, 1), slice(1, 3), slice(0, 3)]))
    b = data.draw(st.integers(0, B - 1))
    mask = BlockMask.from_predicate(rule, SHAPE, (4, 3))
    part = dense()[b, heads, q0:q1, k0:k1]
    kind = mask.kind(b, heads, q0, q1, k0, k1)
    assert kind == PARTIAL or part.all() == part.any() == (kind == FULL)
    whole = by_blocks(dense(), (4, 3))[b, heads, q0 // 4 : -(-q1 // 4), k0 // 3 : -(-k1 // 3)]
    assert (kind == PARTIAL) == (len(np.unique(whole)) > 1 or whole.flat[0] == PARTIAL)


def test_a_traced_predicate_is_asked_once_and_another_for_each_pair() -> None:
    asked: list[int] = []

    def counted(b: Any, h: Any, i: Any, j: Any) -> Any:
        asked.append(np.broadcast(b, h, i, j).size)
        return i >= j

    mask = BlockMask.from_predicate(counted, (1, 1, 16, 16), (4, 4))
    assert sum(asked) == 16 * 16
    asked.clear()
    np.testing.assert_array_equal(mask.to_dense((1, 1, 16, 16))[0, 0], np.tri(16, dtype=bool))
    assert not asked


def test_kinds_are_read_only_and_the_text_says_what_it_is() -> None:
    mask = BlockMask(np.eye(4, dtype=bool), (16, 8))
    with pytest.raises(ValueError, match="read-only"):
        mask.kinds[0] = FULL
    assert repr(mask) == "BlockMask((1, 1, 4, 4) blocks of (16, 8), density 0.25)"


# --- values, not views --------------------------------------------------------------------------


def opaque(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Compute as ``rule`` does, in a way that only arrays can be given to."""
    return np.asarray(rule(*map(np.array, (b, h, i, j))))


def masks() -> dict[str, BlockMask]:
    """Make a mask in every way; all but the last are that of ``rule``."""
    size = (4, 3)
    made = {
        "mask": BlockMask.from_mask(dense(), size),
        "traced": BlockMask.from_predicate(rule, SHAPE, size),
        "opaque": BlockMask.from_predicate(opaque, SHAPE, size),
    }
    made |= {f"not {name}": ~~mask for name, mask in made.items()}
    made["and"] = made["traced"] & made["mask"]
    made["or"] = made["opaque"] | made["traced"]
    made["blocks"] = BlockMask(made["mask"].kinds == FULL, size)
    return made


MASKS = list(masks())


@pytest.mark.parametrize("name", MASKS)
def test_a_copy_is_the_mask(name: str) -> None:
    mask = masks()[name]
    expected = mask.to_dense(SHAPE)
    for again in (pickle.loads(pickle.dumps(mask)), copy.copy(mask), copy.deepcopy(mask)):
        np.testing.assert_array_equal(again.kinds, mask.kinds)
        np.testing.assert_array_equal(again.to_dense(SHAPE), expected)
        assert again.expression == mask.expression
        np.testing.assert_array_equal((~again & mask).to_dense(SHAPE), np.zeros(SHAPE, bool))
        with pytest.raises(ValueError, match="read-only"):
            again.kinds[0] = FULL


@pytest.mark.parametrize("name", MASKS[:-1])
def test_every_way_makes_the_same_mask(name: str) -> None:
    mask = masks()[name]
    np.testing.assert_array_equal(mask.to_dense(SHAPE), dense())
    assert (mask.expression is not None) == name.endswith("traced")


def test_masks_pass_to_other_processes(tmp_path: Path) -> None:
    """A process of its own, which knows none of the functions that the masks were made from."""
    file, found = tmp_path / "masks", tmp_path / "found.npz"
    file.write_bytes(pickle.dumps(masks()))
    code = (
        "import pickle, sys, numpy\n"
        "masks = pickle.load(open(sys.argv[1], 'rb'))\n"
        "dense = {name: mask.to_dense((2, 3, 13, 10)) for name, mask in masks.items()}\n"
        "numpy.savez(sys.argv[2], **dense)\n"
    )
    subprocess.run([sys.executable, "-c", code, file, found], check=True)
    with np.load(found) as there:
        for name, mask in masks().items():
            np.testing.assert_array_equal(there[name], mask.to_dense(SHAPE))


def test_a_long_expression_is_copied() -> None:
    def segments(_b: Any, _h: Any, i: Any, j: Any) -> Any:
        seen = i == j
        for start in range(0, 4000, 2):
            seen = seen | ((i >= start) & (j < start))
        return seen

    mask = BlockMask.from_predicate(segments, (1, 1, 8, 8), (4, 4))
    assert mask.expression is not None
    again = pickle.loads(pickle.dumps(mask))
    assert copy.deepcopy(mask).expression == again.expression == mask.expression


@pytest.mark.usefixtures("cpu_backend")
def test_what_a_mask_was_made_from_may_change() -> None:
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(B, HQ, n, 8)).astype(np.float32) for n in (NQ, NK, NK))
    pairs, blocks, table = dense(), rng.random((4, 4)) < 0.5, np.arange(NK)
    limit = 5

    def traced(_b: Any, _h: Any, _i: Any, j: Any) -> Any:
        return j < limit

    def looked_up(_b: Any, _h: Any, i: Any, j: Any) -> Any:
        return table[np.asarray(j)] <= i

    def made() -> list[BlockMask]:
        of_pairs = BlockMask.from_mask(pairs, (4, 3))
        of_functions = [BlockMask.from_predicate(f, SHAPE, (4, 3)) for f in (traced, looked_up)]
        return [of_pairs, BlockMask(blocks, (4, 3)), *of_functions, of_pairs & of_functions[1]]

    before = made()
    outs = [tileattn.forward(q, k, v, block_mask=mask).out for mask in before]
    pairs[...], blocks[...], table[...], limit = ~pairs, ~blocks, table[::-1].copy(), 2
    for mask, out in zip(before, outs, strict=True):
        np.testing.assert_array_equal(tileattn.forward(q, k, v, block_mask=mask).out, out)
    for mask, out in zip(made(), outs, strict=True):
        assert (tileattn.forward(q, k, v, block_mask=mask).out != out).any()


# --- what is refused ----------------------------------------------------------------------------

GOOD: Any = np.ones((2, 2), bool)
BOOLEANS = "must be a NumPy array of booleans; got"
NDARRAY = "numpy.ndarray of dtype"
AXES = "must have from two to four axes; got shape"
LENGTHS = "must be four non-negative integers (B, Hq, Nq, Nk); got"
PAIR = "must be a pair (queries, keys) of positive integers; got"
of_mask: Any = BlockMask.from_mask
of_predicate: Any = BlockMask.from_predicate


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BlockMask(GOOD.tolist()), TypeError, f"blocks {BOOLEANS} {GOOD.tolist()}"),
        (
            lambda: BlockMask(GOOD * 1.0),
            TypeError,
            f"blocks {BOOLEANS} {NDARRAY} float64 and shape (2, 2)",
        ),
        (lambda: BlockMask(GOOD[0]), ValueError, f"blocks {AXES} (2,)"),
        (lambda: BlockMask(GOOD[None, None, None]), ValueError, f"blocks {AXES} (1, 1, 1, 2, 2)"),
        (
            lambda: of_mask(GOOD * 1),
            TypeError,
            f"mask {BOOLEANS} {NDARRAY} int64 and shape (2, 2)",
        ),
        (lambda: of_mask(GOOD[0]), ValueError, f"mask {AXES} (2,)"),
        *(
            (lambda size=size: BlockMask(GOOD, size), error, f"block_size {PAIR} {size}")
            for size, error in (
                (16, TypeError),
                ((16.0, 16), TypeError),
                ((True, 16), TypeError),
                ((16,), ValueError),
                ((16, 0), ValueError),
            )
        ),
        (
            lambda: of_predicate("rule", SHAPE),
            TypeError,
            "visible must be a function; got 'rule'",
        ),
        (lambda: of_predicate(rule, 8), TypeError, f"shape {LENGTHS} 8"),
        (lambda: of_predicate(rule, (8, 8)), ValueError, f"shape {LENGTHS} (8, 8)"),
        (lambda: of_predicate(rule, (1, 1, -8, 8)), ValueError, f"shape {LENGTHS} (1, 1, -8, 8)"),
        (lambda: of_predicate(rule, (1, True, 8)), ValueError, f"shape {LENGTHS} (1, True, 8)"),
        (lambda: of_predicate(rule, (True,) * 4), TypeError, f"shape {LENGTHS} {(True,) * 4}"),
        (
            lambda: of_predicate(lambda _b, _h, i, j: i - j, SHAPE),
            TypeError,
            f"the result of visible {BOOLEANS} {NDARRAY} int64 and shape (13, 10)",
        ),
        (
            lambda: of_predicate(lambda _b, h, i, j: i >= j and h > 0, SHAPE),
            ValueError,
            "visible must not ask whether a whole array is true: use & and | for and and or, and "
            "numpy.where for if",
        ),
        (
            lambda: of_predicate(lambda *_: int("error of the predicate"), SHAPE),
            ValueError,
            "invalid literal for int() with base 10: 'error of the predicate'",
        ),
        (
            lambda: of_predicate(lambda _b, _h, _i, _j: np.ones(7, bool), SHAPE),
            ValueError,
            "visible must return a shape that broadcasts to that of its indices, "
            f"{(B, HQ, 13, 10)}; got (7,)",
        ),
    ],
)
def test_what_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make()


@pytest.mark.parametrize(
    ("shape", "counts"),
    [
        ((3, HQ, NQ, NK), (3, 3, 4, 4)),
        ((B, 6, NQ, NK), (2, 6, 4, 4)),
        ((B, HQ, NQ, 13), (2, 3, 4, 5)),
        ((B, HQ, NQ + 1, NK), None),
    ],
)
def test_check_says_what_would_fit(shape: tuple[int, int, int, int], counts: Any) -> None:
    mask = BlockMask.from_predicate(rule, SHAPE, (4, 3))
    mask.check(*SHAPE)
    message = "block_mask must be made for (Nq, Nk) = (14, 10); got one for (13, 10)"
    if counts:
        message = (
            f"block_mask must have blocks that broadcast over batch and heads to {counts}, for "
            f"Nq={shape[2]}, Nk={shape[3]} and blocks of (4, 3); got (2, 3, 4, 4)"
        )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        mask.check(*shape)


def test_blocks_fit_every_length_of_as_many_blocks() -> None:
    mask = BlockMask(np.ones((4, 4), bool), (4, 3))
    for Nq in range(13, 17):
        mask.check(B, HQ, Nq, NK)
    with pytest.raises(ValueError, match=r"^block_mask must have"):
        mask.check(B, HQ, 17, NK)
