"""Tree masks on every backend that takes them, against the oracle and dense masks."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tileattn
from tests.arrays import Array, normal
from tests.conftest import Runner
from tests.contract.test_backends import check
from tests.contract.test_paged import able as has_pages
from tests.contract.test_paged import cache
from tileattn import reference
from tileattn.oracle.dense import visibility
from tileattn.testing import AttentionCase, assert_attention_close, error_bound

pytestmark = pytest.mark.usefixtures("one_blas_thread")

B, HQ, HKV, NK, D, DV = 3, 4, 2, 150, 24, 20
LENGTHS = [150, 77, 5]  # the last one is shorter than most trees


def able(runner: Runner) -> None:
    q, k, v, _ = normal((B, HQ, HKV, 2, NK, D, DV))
    reason = runner.why_not(q, k, v, {"tree_mask": np.ones((1, 2, 2), bool)})
    if reason is not None:
        pytest.skip(f"{runner.name}: {reason}")


def ancestors(parents: list[int]) -> Array:
    """Let each node see itself and its ancestors; a parent of -1 is none."""
    tree = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            tree[node] |= tree[parent]
    return tree


def trees(Nq: int, seed: int = 0, count: int = B) -> Array:
    """Draw trees of this many nodes, each after its parent."""
    rng = np.random.default_rng(seed)
    drawn = [ancestors([int(rng.integers(-1, n)) for n in range(Nq)]) for _ in range(count)]
    return np.array(drawn).reshape(count, Nq, Nq)


def score(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any, y: Any) -> Any:
    return s + x[h, j] - 0.1 * y[b] * abs(i - j)


def scattered(b: Any, h: Any, i: Any, j: Any, *_: Any) -> Any:  # noqa: ARG001 - a mask_mod's
    return (j + b) % 5 != h


AUX = np.random.default_rng(3).normal(size=(HQ, NK)), np.arange(B)

OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "lengths": {"kv_lengths": LENGTHS},
    "causal": {"causal": True, "kv_lengths": LENGTHS, "softcap": 3.0},
    "offset": {"causal": True, "q_offset": [60, 3, -2], "sinks": np.linspace(-1, 1, HQ)},
    "window": {"window": (30, 4), "kv_lengths": LENGTHS, "dropout_p": 0.2, "seed": 5},
    "mask_mod": {"mask_mod": scattered, "kv_lengths": LENGTHS},
    "score_mod": {"score_mod": score, "aux": AUX, "kv_lengths": LENGTHS},
    "both": {"score_mod": score, "mask_mod": scattered, "aux": AUX},
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("Nq", [7, *(pytest.param(n, marks=SLOW) for n in (0, 1, 40, 64))])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_trees_with_other_options(runner: Runner, options: dict[str, Any], Nq: int) -> None:
    able(runner)
    q, k, v, dout = normal((B, HQ, HKV, Nq, NK, D, DV), np.float64)
    options = options | {"tree_mask": trees(Nq)}
    _, grads = check(runner, AttentionCase(q, k, v, dout, None, options))
    assert (grads.daux is None) == ("aux" not in options)
    if grads.daux is not None:
        assert [x is None for x in grads.daux] == [False, True]


@settings(max_examples=30)
@given(data=st.data())
def test_any_booleans_are_the_dense_mask_of_their_meaning(runner: Runner, data: Any) -> None:
    """They need be no tree. Rows that see no key are among them."""
    able(runner)
    Nq, Nk = data.draw(st.integers(0, 64)), data.draw(st.integers(0, 150))
    lengths = data.draw(st.lists(st.integers(0, Nk), min_size=B, max_size=B))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    tree = rng.random((data.draw(st.sampled_from([1, B])), Nq, Nq)) < rng.random()
    dtype = data.draw(st.sampled_from([np.float16, np.float32]))
    q, k, v, dout = normal((B, HQ, HKV, Nq, Nk, D, DV), dtype)
    mask = np.zeros((B, 1, Nq, Nk), np.bool_)
    for b, i, j in np.ndindex(B, Nq, Nk):
        node = j - (lengths[b] - Nq)
        mask[b, 0, i, j] = j < lengths[b] and (node < 0 or tree[b % len(tree), i, node])
    dense = {"mask": mask, "kv_lengths": lengths}
    options = {"tree_mask": tree, "kv_lengths": lengths}
    np.testing.assert_array_equal(
        visibility((B, HQ, Nq, Nk), options), np.broadcast_to(mask, (B, HQ, Nq, Nk))
    )
    bounds = error_bound(q, k, v, dout, **dense)
    attention = runner.forward(q, k, v, **options)
    assert_attention_close(attention, reference.forward(q, k, v, **dense), bounds)
    grads = runner.backward(dout, q, k, v, *attention, **options)
    assert_attention_close(grads, reference.backward(dout, q, k, v, **dense), bounds)


@pytest.mark.parametrize("Nq", [1, 6, 33])
@pytest.mark.parametrize("page", [1, 16, 256])
def test_trees_over_pages(runner: Runner, page: int, Nq: int) -> None:
    able(runner)
    has_pages(runner)
    rng = np.random.default_rng(page)
    made = cache(LENGTHS, page, np.float32, rng)
    q = rng.normal(size=(B, HQ, Nq, D)).astype(np.float32)
    options: dict[str, Any] = {"tree_mask": trees(Nq, count=1), "window": (60, None)}
    found = runner.forward(q, made.k_pages, made.v_pages, **made.paged, **options)
    dense = options | {"kv_lengths": LENGTHS}
    expected = reference.forward(q, made.k, made.v, **dense)
    assert_attention_close(found, expected, error_bound(q, made.k, made.v, **dense))


def visible(b: Any, h: Any, i: Any, j: Any, tree: Any, first: Any) -> Any:  # noqa: ARG001 - a mask_mod's
    return (j < first[b]) | tree[b, i, j - first[b]]


@pytest.mark.parametrize("page", [1, 16])
def test_trees_in_packed_sequences_are_a_mask_mod(runner: Runner, page: int) -> None:
    """The recipe of the docs; the last sequence has no tree."""
    able(runner)
    has_pages(runner)
    rng = np.random.default_rng(page)
    counts, lengths = [4, 1, 6, 30], np.array([150, 77, 6, 35])
    made = cache(lengths.tolist(), page, np.float32, rng)
    starts = np.cumsum([0, *counts])
    q = rng.normal(size=(HQ, starts[-1], D)).astype(np.float32)
    tree = np.zeros((4, 6, 6), bool)
    for b, n in enumerate(counts[:3]):
        tree[b, :n, :n] = trees(n, b, 1)[0]
    first = lengths - counts
    first[3] = lengths[3]
    packed = {"cu_seqlens_q": starts, "causal": True, "mask_mod": visible, "aux": (tree, first)}
    out, lse = runner.forward(q, made.k_pages, made.v_pages, **made.paged, **packed)
    for b, n in enumerate(counts):
        at, length = slice(starts[b], starts[b + 1]), int(lengths[b])
        given = q[np.newaxis, :, at], made.k[b : b + 1, :, :length], made.v[b : b + 1, :, :length]
        own: dict[str, Any] = {"causal": True}
        if b < 3:
            own["tree_mask"] = tree[b : b + 1, :n, :n]
        found = out[np.newaxis, :, at], lse[np.newaxis, :, at]
        assert_attention_close(found, reference.forward(*given, **own), error_bound(*given, **own))


@pytest.mark.parametrize("Nq", [1, 9, 64])
def test_a_chain_is_causal(runner: Runner, Nq: int) -> None:
    able(runner)
    q, k, v, _ = normal((B, HQ, HKV, Nq, NK, D, DV), np.float32)
    chain = ancestors([n - 1 for n in range(Nq)])[np.newaxis]
    found = runner.forward(q, k, v, tree_mask=chain, kv_lengths=LENGTHS)
    causal: dict[str, Any] = {"causal": True, "kv_lengths": LENGTHS}
    expected = reference.forward(q, k, v, **causal)
    assert_attention_close(found, expected, error_bound(q, k, v, **causal))
    if runner.name == "llvm":  # its kernels take the same tiles of keys, whatever the mask
        again = runner.forward(q, k, v, **causal)
        np.testing.assert_array_equal(found.out, again.out)
        np.testing.assert_array_equal(found.lse, again.lse)


def test_a_leaf_has_the_result_of_its_branch_alone(runner: Runner) -> None:
    """Verification of drafts relies on this."""
    able(runner)
    parents = [-1, 0, 0, 1, 1, 2, 3]
    tree = ancestors(parents)
    q, k, v, _ = normal((1, HQ, HKV, len(parents), NK, D, DV), np.float32)
    found = runner.forward(q, k, v, tree_mask=tree[np.newaxis])
    past = NK - len(parents)
    for leaf in (4, 5, 6):
        branch = np.flatnonzero(tree[leaf])
        keys = [*range(past), *(past + branch)]
        alone = q[:, :, branch], k[:, :, keys], v[:, :, keys]
        expected = reference.forward(*alone, causal=True)
        rows = tileattn.Attention(found.out[:, :, branch], found.lse[:, :, branch])
        assert_attention_close(rows, expected, error_bound(*alone, causal=True))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_keys_that_no_query_sees_may_hold_anything(runner: Runner, wrong: float) -> None:
    able(runner)
    Nq = 9
    q, k, v, dout = normal((B, HQ, HKV, Nq, NK, D, DV), np.float32)
    tree = trees(Nq)
    tree[:, :, 4] = False
    options: dict[str, Any] = {"tree_mask": tree, "kv_lengths": [150, 77, 40]}
    clean = runner.forward(q, k, v, **options)
    of_clean = runner.backward(dout, q, k, v, *clean, **options)
    k, v = k.copy(), v.copy()
    for b, length in enumerate(options["kv_lengths"]):
        k[b, :, length - Nq + 4], v[b, :, length - Nq + 4] = wrong, wrong
    found = runner.forward(q, k, v, **options)
    grads = runner.backward(dout, q, k, v, *found, **options)
    for actual, expected in zip((*found, *grads[:3]), (*clean, *of_clean[:3]), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"tree_mask": [[[True]]]}, TypeError, "tree_mask must be a NumPy array; got [[[True]]]"),
        ({"tree_mask": np.ones((1, 2, 2))}, TypeError, "tree_mask must have dtype bool; got"),
        (
            {"tree_mask": np.ones((2, 2), bool)},
            ValueError,
            "tree_mask must have shape (1, 2, 2) or (3, 2, 2); got (2, 2)",
        ),
        (
            {"tree_mask": np.ones((3, 2, 3), bool)},
            ValueError,
            "tree_mask must have shape (1, 2, 2) or (3, 2, 2); got (3, 2, 3)",
        ),
        (
            {"cu_seqlens_q": [0, 2], "cu_seqlens_k": [0, NK]},
            tileattn.UnsupportedError,
            "tree_mask is not supported with cu_seqlens_q; use mask_mod=lambda b, h, i, j, tree, ",
        ),
        ({"aux": (np.zeros(3),)}, ValueError, "aux must be empty without score_mod or"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v, _ = normal((B, HQ, HKV, 2, NK, D, DV))
    call: dict[str, Any] = {"tree_mask": np.ones((1, 2, 2), bool), **changed}
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        tileattn.forward(q, k, v, **call)
