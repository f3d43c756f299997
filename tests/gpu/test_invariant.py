"""``invariant=True`` on a GPU: a row has the same bits in whatever call computes it."""

from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tests.arrays import paged
from tests.on_gpu import host, needs_gpu, poisoned, sent
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]
pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

B, HQ, HKV = 2, 8, 2
N = 8900  # keys: two splits and a part of one
HALVES = ml_dtypes.bfloat16, np.float16
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": (3500, 0), "softcap": 20.0},
    "sinks": {"sinks": np.linspace(-2, 3, HQ, dtype=np.float32)},
}


class Prompt(NamedTuple):
    """The arrays of a whole prompt, its options, and the rows that its prefill computes."""

    q: Array
    k: Array
    v: Array
    options: dict[str, Any]
    whole: tileattn.Attention

    def rows(self, ends: Any, count: int) -> tuple[Array, tileattn.Attention]:
        """Return the last ``count`` queries before some lengths, and their results."""

        def cut(x: Array) -> Array:
            return np.stack([x[b, :, end - count : end] for b, end in enumerate(ends)])

        return cut(self.q), tileattn.Attention(*map(cut, self.whole))


def call(q: Array, k: Array, v: Array, **options: Any) -> tileattn.Attention:
    """Run a call in poisoned memory, with its arrays on the GPU."""
    given = {name: sent(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    with poisoned():
        found = tileattn.forward(*map(sent, (q, k, v)), invariant=True, causal=True, **given)
    result: tileattn.Attention = host(found)
    return result


def prompt(dims: tuple[int, int], dtype: Any, *, unsafe: bool = False, **options: Any) -> Prompt:
    """Draw a prompt; an ``unsafe`` one has large scores, NaN and infinity."""
    rng, (D, Dv) = np.random.default_rng(sum(dims)), dims
    shapes = (B, HQ, N, D), (B, HKV, N, D), (B, HKV, N, Dv)
    q, k, v = (rng.standard_normal(x, np.float32).astype(dtype) for x in shapes)
    if unsafe:
        q[0, 1] *= 300
        q[1, 3, 5000:] *= -200
        v[1, 0, 2500], k[0, 1, 3000] = np.nan, np.inf
    return Prompt(q, k, v, options, call(q, k, v, **options))


def agree(found: tileattn.Attention, wanted: tileattn.Attention) -> None:
    for pair in zip(found, wanted, strict=True):
        own, other = (np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in pair)
        np.testing.assert_array_equal(own, other)


def check(made: Prompt) -> None:
    """Compare chunks, decoding, speculative steps, pages and packed sequences with the prefill."""
    q, k, v, options, whole = made
    rng = np.random.default_rng(1)
    for start, end in pairwise([0, 1, 65, 700, 4095, 4096, 4300, 8192, N]):
        found = call(q[:, :, start:end], k, v, kv_lengths=[end] * B, **options)
        agree(found, tileattn.Attention(*(x[:, :, start:end] for x in whole)))
    lengths = [[N, 4096], [4097, 1], [8192, 64], *rng.integers(1, N, (6, B)).tolist()]
    for ends in lengths:
        rows, wanted = made.rows(ends, 1)
        agree(call(rows, k, v, kv_lengths=np.array(ends), **options), wanted)
        cut = [x[:, :, : max(ends)] for x in (k, v)]
        agree(call(rows, *cut, kv_lengths=ends, **options), wanted)
    for page, count in ((16, 4), (64, 7), (128, 1), (3, 3), (16, 200), (1, 1)):
        ends = rng.integers(count, N, B)
        rows, wanted = made.rows(ends, count)
        agree(call(rows, k, v, kv_lengths=ends, **options), wanted)
        (pages, table), (values, _) = (paged(x, ends, page) for x in (k, v))
        places = {"kv_lengths": ends.astype(np.int32), "block_table": table, **options}
        agree(call(rows, pages, values, **places), wanted)
        packed = [np.concatenate(list(x), 1)[None] for x in (rows, *wanted)]
        starts = np.arange(B + 1, dtype=np.int32) * count
        found = call(packed[0], pages, values, cu_seqlens_q=starts, **places)
        agree(found, tileattn.Attention(*packed[1:]))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_bits(dims: tuple[int, int], name: str) -> None:
    check(prompt(dims, HALVES[len(name) % 2], **OPTIONS[name]))


@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
def test_bits_of_large_and_non_finite_scores(dtype: Any) -> None:
    check(prompt((128, 128), dtype, unsafe=True))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_results(dims: tuple[int, int]) -> None:
    q, k, v, _, whole = prompt(dims, HALVES[dims[0] % 64 > 0])
    rows = slice(N - 40, N)
    own = q[:, :, rows], k, v
    found = tileattn.Attention(*(x[:, :, rows] for x in whole))
    expected = reference.forward(*own, causal=True)
    assert_attention_close(found, expected, error_bound(*own, causal=True))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16], ids=str)
def test_bits_of_the_generic_kernels(dtype: Any) -> None:
    """They compute all rows of such calls, also a single one."""
    rng, n = np.random.default_rng(0), 2300
    shapes = (B, HQ, n, 24), (B, HKV, n, 24), (B, HKV, n, 20)
    q, k, v = (rng.standard_normal(x).astype(dtype) for x in shapes)
    whole = call(q, k, v)
    for end in (n, 2048, 65, 1):
        found = call(q[:, :, end - 1 : end], k, v, kv_lengths=[end] * B)
        agree(found, tileattn.Attention(*(x[:, :, end - 1 : end] for x in whole)))


def test_masks_of_own_functions() -> None:
    """Key tiles come from a list then."""
    made = prompt((128, 128), HALVES[0])
    options: dict[str, Any] = {"mask_mod": lambda _b, _h, i, j: (i // 64 + j // 64) % 3 > 0}
    q, k, v = made[:3]
    whole = call(q, k, v, q_offset=0, **options)
    for end in (N, 8192, 700):
        # Functions count queries from the first one of the call.
        found = call(q[:, :, :end], k, v, q_offset=0, **options)
        agree(found, tileattn.Attention(*(x[:, :, :end] for x in whole)))


def test_refused_combinations() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, 8, 320)).astype(ml_dtypes.bfloat16) for _ in range(3))
    pages = {"block_table": np.array([[0]]), "kv_lengths": [8]}
    with pytest.raises(tileattn.UnsupportedError, match="invariant"):
        call(q, k, v, **pages)
    small = [sent((20 * x[..., :64]).astype(np.int8)) for x in (k, v)]
    factors: dict[str, Any] = {"k_descale": 0.1, "v_descale": 0.1}
    with pytest.raises(tileattn.UnsupportedError, match="invariant"):
        tileattn.forward(sent(q[..., :64]), *small, invariant=True, **factors)
