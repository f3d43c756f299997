"""Cascades and merged results on a GPU: the oracle's results, graphs, and the merge kernel."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.merged_results import check_merged, parts, special_parts
from tests.on_gpu import bits, captured, host, needs_gpu, poisoned, sent
from tests.shared_pages import SharedCache, shared_cache
from tileattn import reference
from tileattn.dtypes import BFLOAT16, CACHE_DTYPES, DTYPES
from tileattn.testing import assert_attention_close, error_bound

pytestmark = needs_gpu

OWN = [1, 70, 33, 500, 5, 16, 90, 250]  # keys of each sequence after the shared ones
CASES: dict[str, tuple[list[int], tuple[int, int], tuple[int, int], int]] = {
    "one group": ([90], (8, 2), (128, 128), 16),  # shared pages, heads, D and Dv, page
    "two groups": ([40, 7], (8, 2), (64, 64), 64),
    "nothing shared in one": ([0, 120, 3, 30], (4, 4), (128, 64), 16),
    "one key head": ([300], (16, 1), (128, 128), 8),
    "pages of any size": ([31, 9], (6, 2), (40, 24), 13),
    "pages of one key": ([200], (2, 1), (64, 64), 1),
}


def drawn(name: str, Nq: int, dtype: Any, kv_dtype: Any = None) -> SharedCache:
    shared, heads, dims, page = CASES[name]
    own = [n + Nq - 1 for n in OWN]
    rng = np.random.default_rng(0)
    return shared_cache(rng, shared, own, page, heads, Nq, dims, dtype, kv_dtype, more_columns=2)


def there(made: SharedCache, **options: Any) -> dict[str, Any]:
    """Send all arrays, integers included."""
    given = {"q": made.q, "k": made.k_pages, "v": made.v_pages, **made.paged, **options}
    return {name: sent(x) for name, x in given.items()}


def check(found: Any, made: SharedCache, **options: Any) -> None:
    """Compare with the oracle."""
    given = made.dense | options
    expected = reference.forward(*made[:3], **given)
    assert_attention_close(host(found), expected, error_bound(*made[:3], **given))


@pytest.mark.parametrize("Nq", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_match_the_oracle(name: str, dtype: Any, Nq: int) -> None:
    """Shared lengths may be on the host or on the GPU; unused rows hold NaN."""
    made = drawn(name, Nq, dtype)
    sums = np.float64 if dtype == np.float64 else np.float32
    options = {"causal": True, "sinks": np.linspace(-1, 2, made.q.shape[1]).astype(sums)}
    for shared in (made.shared_lengths, sent(np.array(made.shared_lengths, np.int32))):
        with poisoned():
            check(tileattn.cascade(**there(made), shared_lengths=shared), made)
            found = tileattn.cascade(**there(made, **options), shared_lengths=shared)
        check(found, made, **options)


@pytest.mark.parametrize("kind", CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_pages_of_8_bits(dtype: Any, kind: Any) -> None:
    made = drawn("two groups", 1, dtype, kind)
    check(tileattn.cascade(**there(made), shared_lengths=made.shared_lengths), made)
    heads = {name: np.full((8, 2), 0.01, np.float32) for name in ("k_descale", "v_descale")}
    made = made._replace(dense=made.dense | heads, paged=made.paged | heads)
    check(tileattn.cascade(**there(made), shared_lengths=made.shared_lengths), made)


@pytest.mark.parametrize("in_groups", [80, 67])
def test_large_groups(in_groups: int) -> None:
    """A group of 80 is divided into two of 40; 67 is prime."""
    rng = np.random.default_rng(5)
    own = rng.integers(1, 90, 2 * in_groups).tolist()
    made = shared_cache(rng, [30, 11], own, 16, (8, 2), 1, (64, 64), BFLOAT16)
    for shared in (made.shared_lengths, sent(np.array(made.shared_lengths, np.int32))):
        check(tileattn.cascade(**there(made), shared_lengths=shared), made)


def test_trees_of_drafts_and_softcap() -> None:
    made = drawn("one group", 5, BFLOAT16)
    tree = np.tril(np.random.default_rng(1).random((8, 5, 5)) < 0.6) | np.eye(5, dtype=bool)
    options = {"tree_mask": tree, "softcap": 5.0, "scale": 0.1}
    check(tileattn.cascade(**there(made, **options), shared_lengths=1440), made, **options)


def test_integers_on_the_host() -> None:
    made = drawn("two groups", 1, np.float16)
    given = there(made) | {name: made.paged[name] for name in ("block_table", "kv_lengths")}
    on_host = tileattn.cascade(**given, shared_lengths=made.shared_lengths)
    check(on_host, made)
    assert bits(on_host) == bits(tileattn.cascade(**there(made), shared_lengths=[2560, 448]))


@pytest.mark.parametrize("kind", [np.int32, np.int64], ids=lambda x: x.__name__)
def test_a_graph_replays_other_lengths_and_pages(kind: Any) -> None:
    """Nothing is copied from the host, and nothing waits for the GPU: both break a capture."""
    made = drawn("two groups", 1, BFLOAT16)
    given = there(made)
    integers = {name: sent(made.paged[name].astype(kind)) for name in ("block_table", "kv_lengths")}
    shared = sent(np.array(made.shared_lengths, kind))
    call = given | integers | {"shared_lengths": shared}
    with captured(lambda: tileattn.cascade(**call)) as (results, replay):
        replay()
        check(results, made)
        shared.set(np.array([64, 0], kind))
        replay()
        check(results, made)
        shorter = made.dense["kv_lengths"] - np.array([0, 69, 2, 9, 4, 1, 8, 0])
        integers["kv_lengths"].set(shorter.astype(kind))
        moved = np.random.default_rng(2).permutation(len(made.k_pages))  # new places of pages
        given["k"].set(made.k_pages[np.argsort(moved)])
        given["v"].set(made.v_pages[np.argsort(moved)])
        table = made.paged["block_table"]
        used = (table >= 0) & (table < len(moved))
        table = np.where(used, moved[np.where(used, table, 0)], -1)
        integers["block_table"].set(table.astype(kind))
        replay()
        check(results, made._replace(dense={"kv_lengths": shorter}))


def test_a_graph_of_an_integer_on_the_host() -> None:
    made = drawn("one group", 1, np.float16)
    given = there(made)
    with captured(lambda: tileattn.cascade(**given, shared_lengths=1440)) as (results, replay):
        replay()
        check(results, made)


def test_a_sequence_has_the_same_bits_beside_any_others() -> None:
    """The sequences of a group may change, if the number of their rows does not."""
    made = drawn("one group", 1, BFLOAT16)
    found = tileattn.cascade(**there(made), shared_lengths=1440)
    order = np.array([3, 1, 0, 2, 7, 6, 4, 5])
    paged = {name: x[order] for name, x in made.paged.items()}
    others = made._replace(q=made.q[order], paged=paged)
    again = tileattn.cascade(**there(others), shared_lengths=1440)
    assert bits(again) == bits([x[order] for x in host(found)])


# --- merge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_merged_results_match_the_oracle(count: int, dtype: Any) -> None:
    """Any number of parts, in rows of any length; parts may be views."""
    for shape in ((3, 5, 200, 128), (2, 3, 4, 7, 15), (2, 2, 3, 1, 5, 24), (1000, 520), (3, 1)):
        outs, lses = parts(count, dtype, shape)
        views = [sent(x.swapaxes(0, -2).copy()).swapaxes(0, -2) for x in outs]
        for given in (list(map(sent, outs)), views):
            with poisoned():
                found = tileattn.merge(given, list(map(sent, lses)))
            check_merged(host(found), outs, lses)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_merged_infinities_and_nan() -> None:
    outs, lses = special_parts()
    found = tileattn.merge(list(map(sent, outs)), list(map(sent, lses)))
    check_merged(host(found), outs, lses)


# --- tensors --------------------------------------------------------------------------------------


def test_a_graph_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="it captures tensors: pip install torch")
    from tileattn.torch import cascade

    made = drawn("two groups", 1, np.float16)
    arrays = {"q": made.q, "k": made.k_pages, "v": made.v_pages, **made.paged}
    given = {name: torch.from_numpy(x).cuda() for name, x in arrays.items()}
    given["shared_lengths"] = torch.tensor(made.shared_lengths, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cascade(**given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cascade(**given)
    graph.replay()
    check(tileattn.Attention(*(x.cpu().numpy() for x in found)), made)
