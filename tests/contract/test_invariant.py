"""With ``invariant=True`` a row has the same bits in every call in which it attends to its keys."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.arrays import paged
from tests.conftest import Runner, runner_of
from tileattn import Attention
from tileattn.testing.options import Choices

Array = NDArray[Any]

BACKENDS = ["llvm", "numpy"]
_FIRST = 5  # batch index of the first prompt: an origin adds the number of the entry to its own


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Runner:
    return runner_of(request.param)


class Chunk(NamedTuple):
    """Queries ``start`` to ``stop - 1`` of a prompt, counted as its keys are."""

    prompt: int
    start: int
    stop: int


class Call(NamedTuple):
    """How a call computes chunks."""

    chunks: Sequence[Chunk]  # of one length, unless packed
    packed: bool = False
    page: int | None = None  # keys of a page
    spare: int = 0  # keys that the cache has after those that the last query attends to


class Prompts:
    """Prompts of one length, whose last queries are computed by one call, and by others.

    Parameters
    ----------
    sizes : sequence of int
        Prompts, query heads, key heads, queries, tokens, D and Dv.
    dtype : dtype
        Dtype of q, k and v.
    options : dict
        Options of all calls; ``bias`` and ``mask`` have a row for each query.
    right : int or None
        Keys after its own position that a query attends to; None for all.
    """

    def __init__(
        self, sizes: Sequence[int], dtype: Any, options: dict[str, Any], right: int | None = 0
    ) -> None:
        B, Hq, Hkv, Nq, self.N, D, Dv = sizes
        self.first, self.right = self.N - Nq, right
        rng = np.random.default_rng(0)
        self.q = rng.normal(size=(B, Hq, Nq, D)).astype(dtype)
        self.k = rng.normal(size=(B, Hkv, self.N, D)).astype(dtype)
        self.v = rng.normal(size=(B, Hkv, self.N, Dv)).astype(dtype)
        self.options = options.copy()
        of_pairs = [name for name in options if name in ("bias", "mask")]
        self.of_pairs: dict[str, Array] = {name: self.options.pop(name) for name in of_pairs}
        self.by_index = not self.options.keys().isdisjoint({"dropout_p", "score_mod", "mask_mod"})

    def whole(self, backend: Runner) -> Attention:
        """Compute all queries of all prompts, without padding after their keys."""
        options: dict[str, Any] = {"q_offset": self.first, "invariant": True}
        options |= self.options | self.of_pairs
        if self.by_index:
            options["origin"] = (_FIRST, 0, self.first, 0)
        return backend.forward(self.q, self.k, self.v, **options)

    def found(self, backend: Runner, call: Call) -> list[Attention]:
        """Compute the results of each chunk."""
        chunks, pack, page, _ = call
        lengths = self._lengths(call)
        k, v, options = self._keys(chunks, lengths, pack, page)
        rows = [self.q[x.prompt, :, self.rows(x)] for x in chunks]
        ends = np.cumsum([0, *(x.stop - x.start for x in chunks)])
        options["q_offset"] = np.array([x.start for x in chunks])
        if self.by_index:
            places = [(_FIRST + x.prompt - n, 0, x.start, 0) for n, x in enumerate(chunks)]
            options["origin"] = np.array(places)
        for name, x in self.of_pairs.items():
            of_chunks = np.stack([x[:, self.rows(c)] for c in chunks])
            keys = options["block_table"].shape[1] * page if page else k.shape[2]
            spare = np.zeros((*of_chunks.shape[:-1], max(0, keys - self.N)), x.dtype)
            options[name] = np.concatenate([of_chunks, spare], axis=-1)[..., :keys]
        if pack:
            options["cu_seqlens_q"] = ends
        q = np.concatenate(rows, axis=1) if pack else np.stack(rows)
        found = backend.forward(q, k, v, invariant=True, **self.options, **options)
        if not pack:
            return [Attention(*(x[n] for x in found)) for n in range(len(chunks))]
        return [Attention(*(x[:, slice(*span)] for x in found)) for span in pairwise(ends)]

    def rows(self, chunk: Chunk) -> slice:
        """Return the places of a chunk among the queries."""
        return slice(chunk.start - self.first, chunk.stop - self.first)

    def _lengths(self, call: Call) -> list[int]:
        """Return the keys of each chunk: those that it attends to, and some more."""
        more = self.N if self.right is None else self.right + call.spare
        return [min(self.N, x.stop + more) for x in call.chunks]

    def _keys(
        self, chunks: Sequence[Chunk], lengths: Sequence[int], pack: bool, page: int | None
    ) -> tuple[Array, Array, dict[str, Any]]:
        """Return keys and values of chunks and the options that describe them; the rest is NaN."""
        caches = []
        for x in (self.k, self.v):
            cache = np.full((len(chunks), x.shape[1], max(lengths) + 3, x.shape[3]), np.nan)
            for n, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
                cache[n, :, :length] = x[chunk.prompt, :, :length]
            caches.append(cache.astype(x.dtype))
        options: dict[str, Any] = {"kv_lengths": np.array(lengths)}
        if page is not None:
            (k, options["block_table"]), (v, _) = (paged(x, lengths, page) for x in caches)
            return k, v, options
        if not pack:
            k, v = caches
            return k, v, options
        k, v = (
            np.concatenate([x[n, :, :length] for n, length in enumerate(lengths)], axis=1)
            for x in caches
        )
        return k, v, {"cu_seqlens_k": np.cumsum([0, *lengths])}


def bits(x: Array) -> Array:
    """Return floating-point numbers as integers."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def hold(prompts: Prompts, whole: Attention, found: list[Attention], call: Call) -> None:
    """Compare the bits of chunks with the bits of the same rows of all prompts."""
    for chunk, own in zip(call.chunks, found, strict=True):
        rows = prompts.rows(chunk)
        for ours, theirs in zip(own, whole, strict=True):
            np.testing.assert_array_equal(bits(ours), bits(theirs[chunk.prompt, :, rows]))


class Shrinkable(Choices):
    """Choices that Hypothesis makes."""

    def __init__(self, data: st.DataObject) -> None:
        super().__init__(np.random.default_rng(0))
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))


def draw_call(choices: Choices, prompts: Prompts) -> Call:
    """Draw one to three chunks: of one query as in decoding, of a few, or of many."""
    pack = not prompts.of_pairs and choices.coin()
    longest = len(prompts.q[0, 0])
    chunks: list[Chunk] = []
    for n in range(choices.integer(1, 3)):
        if pack or n == 0:
            length = choices.one_of(1, 1, 2, 5, 33, longest)
        start = prompts.first + choices.integer(0, longest - length)
        chunks.append(Chunk(choices.integer(0, len(prompts.q) - 1), start, start + length))
    return Call(chunks, pack, choices.one_of(None, 1, 3, 16, 64), choices.integer(0, 20))


def check(backend: Runner, prompts: Prompts, examples: int) -> None:
    """Compare drawn calls with the call of all prompts."""
    whole = prompts.whole(backend)
    assert all(np.isfinite(x.astype(float)).all() for x in whole)

    @settings(max_examples=examples)
    @given(data=st.data())
    def compare(data: st.DataObject) -> None:
        call = draw_call(Shrinkable(data), prompts)
        hold(prompts, whole, prompts.found(backend, call), call)

    compare()


# --- options and dtypes ---------------------------------------------------------------------------

RNG = np.random.default_rng(1)
SIZES = 2, 4, 2, 150, 150, 20, 24
PAIRS = (4, 150, 150)
SCORES = {
    "causal": True,
    "scale": 0.3,
    "softcap": 3.0,
    "alibi_slopes": np.linspace(0.01, 0.2, 4, dtype=np.float32),
    "sinks": np.linspace(-1, 1, 4, dtype=np.float32),
}
SEEN = RNG.random(PAIRS) < 0.6
SEEN[..., 0] = True  # each row attends to a key


def stripes(_b: Any, h: Any, i: Any, j: Any) -> Any:
    return ((7 * i + 3 * j + h) % 5 != 0) | (j == 0)


def slanted(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s - 0.01 * abs(i - j) * (h + 1) + 0.1 * b


OPTIONS: dict[str, tuple[dict[str, Any], int | None]] = {
    "causal": ({"causal": True}, 0),
    "all keys": ({}, None),
    "window": ({"window": (37, 0), "sinks": SCORES["sinks"]}, 0),
    "both sides": ({"window": (50, 9)}, 9),
    "scores": (SCORES, 0),
    "bias": ({"causal": True, "bias": RNG.normal(size=PAIRS).astype(np.float32)}, 0),
    "mask": ({"mask": SEEN}, None),
    "mask below the diagonal": ({"mask": np.tril(SEEN)}, 20),
    "functions": ({"causal": True, "mask_mod": stripes, "score_mod": slanted}, 0),
    "dropout": ({"causal": True, "dropout_p": 0.3, "seed": 5}, 0),
}
"""Options, and the keys after its own position that a query attends to."""


@pytest.mark.parametrize(("options", "right"), OPTIONS.values(), ids=OPTIONS.keys())
def test_a_row_has_the_same_bits_in_any_call(
    backend: Runner, options: dict[str, Any], right: int | None
) -> None:
    check(backend, Prompts(SIZES, np.float32, options, right), examples=12)


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        (np.float16, (2, 4, 1, 301, 301, 64, 64)),
        (ml_dtypes.bfloat16, (2, 3, 3, 77, 130, 128, 128)),
        (np.float64, (2, 8, 1, 130, 133, 20, 1)),
    ],
    ids=["float16", "bfloat16", "float64"],
)
def test_dtypes_and_groups_of_heads(backend: Runner, dtype: Any, sizes: Sequence[int]) -> None:
    check(backend, Prompts(sizes, dtype, {"causal": True}), examples=10)


# --- places where a kernel sums in another way ----------------------------------------------------


@pytest.mark.parametrize("window", [(None, 0), (30, 0), (4200, 40)])
def test_rows_on_both_sides_of_a_section_of_keys(
    backend: Runner, window: tuple[int | None, int | None]
) -> None:
    """Rows before 4096 keys have one section in the LLVM kernels; their neighbours have two."""
    sizes = (2, 4, 2, 70, 4096 + 40, 16, 8)
    check(backend, Prompts(sizes, np.float32, {"window": window}, window[1]), examples=12)


def test_keys_that_only_neighbours_attend_to_may_be_nan(backend: Runner) -> None:
    prompts = Prompts(SIZES, np.float32, {"window": (15, 0)})
    expected = prompts.whole(backend)
    prompts.k[:, :, 70], prompts.v[:, :, 70] = np.nan, np.inf
    whole = prompts.whole(backend)
    for ours, theirs in zip(whole, expected, strict=True):
        for rows in (slice(0, 70), slice(86, None)):
            np.testing.assert_array_equal(bits(ours[:, :, rows]), bits(theirs[:, :, rows]))


@pytest.mark.parametrize("length", [1, 3, 9])
def test_a_chain_of_drafts_has_the_bits_of_a_prefill(backend: Runner, length: int) -> None:
    prompts = Prompts(SIZES, np.float32, {"causal": True})
    whole, chain = prompts.whole(backend), np.tril(np.ones((1, length, length), np.bool_))
    for stop in (length, 64, 66, 129, prompts.N):
        rows = slice(stop - length, stop)
        keys = {"kv_lengths": [stop] * 2, "tree_mask": chain, "invariant": True}
        found = backend.forward(prompts.q[:, :, rows], prompts.k, prompts.v, **keys)
        for ours, theirs in zip(found, whole, strict=True):
            np.testing.assert_array_equal(bits(ours), bits(theirs[:, :, rows]))


@pytest.mark.parametrize("of_tokens", [False, True])
def test_a_cache_of_8_bits(backend: Runner, of_tokens: bool) -> None:
    rng = np.random.default_rng(2)
    q = rng.normal(size=(2, 4, 140, 20)).astype(np.float32)
    k, v = (rng.normal(size=(2, 2, 2, 140, 20)) * 30).astype(np.int8)
    shape = (2, 2, 140) if of_tokens else (2, 2)
    descales = rng.uniform(0.01, 0.05, (2, *shape)).astype(np.float32)

    def forward(first: int, stop: int, k: Array, v: Array, scales: Any, **more: Any) -> Any:
        more |= {"k_descale": scales[0], "v_descale": scales[1], "causal": True}
        return backend.forward(q[:, :, first:stop], k, v, invariant=True, **more)

    whole = forward(0, 140, k, v, descales)
    for first, stop in ((0, 1), (63, 64), (64, 65), (60, 90), (137, 140)):
        lengths = [stop] * 2
        (k_pages, table), (v_pages, _) = (paged(x, lengths, 16, spare=0) for x in (k, v))
        scales = [*descales]
        if of_tokens:
            scales = [paged(x[..., None], lengths, 16)[0][..., 0] for x in descales]
        more = {"kv_lengths": lengths, "block_table": table}
        found = forward(first, stop, k_pages, v_pages, scales, **more)
        for ours, theirs in zip(found, whole, strict=True):
            np.testing.assert_array_equal(bits(ours), bits(theirs[:, :, first:stop]))
