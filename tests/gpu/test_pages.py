"""Many queries over keys in pages: the Hopper kernel, beside the one that cuts keys into splits."""

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.arrays import paged
from tests.on_gpu import bits, host, needs_gpu, poisoned, sent
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

HQ, HKV = 8, 2
LENGTHS = np.array([700, 0, 333, 1008, 500])
CAPACITY = 1008
PACKED = np.array([0, 300, 303, 320, 749, 752])  # of queries; 32 and fewer have few rows


def drawn(B: int, Nq: int, D: int, Dv: int, dtype: Any) -> list[Any]:
    rng = np.random.default_rng(Nq)
    sizes = (B, HQ, Nq, D), (len(LENGTHS), HKV, CAPACITY, D), (len(LENGTHS), HKV, CAPACITY, Dv)
    return [rng.normal(size=size).astype(dtype) for size in sizes]


def called(
    arrays: list[Any], page: int, spare: Any, *, there: bool = True, **options: Any
) -> tileattn.Attention:
    """Attend to keys in pages, with integers on the GPU or on the host."""
    q, k, v = arrays
    (k, table), (v, _) = (paged(x, LENGTHS, page, spare) for x in (k, v))
    kind = np.int32 if page % 16 else np.int64
    given: dict[str, Any] = {"kv_lengths": LENGTHS, "block_table": table.astype(kind)}
    if there:
        given = {name: sent(x) for name, x in given.items()}
    given |= {name: sent(x) for name, x in options.items()}
    with poisoned():
        return tileattn.forward(*map(sent, (q, k, v)), **given)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "sinks": np.linspace(-1, 1, HQ)},
    "window": {"window": (200, 2), "softcap": 3.0, "alibi_slopes": np.linspace(0.1, 1, HQ)},
}


@pytest.mark.parametrize("spare", [0, np.nan], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("page", [1, 3, 8, 16, 24, 56, 144, 1008])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_batches(dims: tuple[int, int], page: int, name: str, spare: float) -> None:
    """A row has the bits that it has with a contiguous cache."""
    arrays = drawn(len(LENGTHS), 301, *dims, ml_dtypes.bfloat16)
    options = OPTIONS[name]
    found = called(arrays, page, spare, there=page != 144, **options)
    given = {"kv_lengths": LENGTHS} | options
    expected = reference.forward(*arrays, **given)
    assert_attention_close(host(found), expected, error_bound(*arrays, **given))
    contiguous = tileattn.forward(*map(sent, arrays), **{n: sent(x) for n, x in given.items()})
    assert bits(found) == bits(contiguous)


@pytest.mark.parametrize("page", [1, 16, 144])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_passes_that_are_safe_for_nan_and_large_scores(D: int, page: int) -> None:
    q, k, v = drawn(len(LENGTHS), 301, D, D, ml_dtypes.bfloat16)
    q[0, 1] *= 300
    v[2, 0, 5], k[3, 1, 7] = np.nan, np.inf
    options = {"causal": True}
    found = called([q, k, v], page, np.nan, **options)
    given = {"kv_lengths": LENGTHS} | options
    contiguous = tileattn.forward(*map(sent, (q, k, v)), **{n: sent(x) for n, x in given.items()})
    assert bits(found) == bits(contiguous)


@pytest.mark.parametrize("page", [1, 16, 144])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("D", [64, 128])
def test_packed_queries(D: int, name: str, page: int) -> None:
    """Each sequence has the bits that it has alone, whichever kernel takes it."""
    q, k, v = drawn(1, int(PACKED[-1]), D, D, np.float16)
    options = OPTIONS[name]
    found = called([q, k, v], page, np.nan, cu_seqlens_q=PACKED, **options)
    for b, (start, end) in enumerate(pairwise(PACKED)):
        one = q[:, :, start:end], k[b : b + 1], v[b : b + 1]
        given = {"kv_lengths": LENGTHS[b : b + 1]} | options
        expected = reference.forward(*one, **given)
        own = type(found)(found.out[:, :, start:end], found.lse[:, :, start:end])
        assert_attention_close(host(own), expected, error_bound(*one, **given))


@pytest.mark.parametrize("page", [3, 16, 24])
def test_packed_queries_have_the_same_bits_alone(page: int) -> None:
    q, k, v = drawn(1, int(PACKED[-1]), 128, 128, np.float16)
    found = called([q, k, v], page, 0, cu_seqlens_q=PACKED, causal=True)
    (k, table), (v, _) = (paged(x, LENGTHS, page) for x in (k, v))
    for b, (start, end) in enumerate(pairwise(PACKED)):
        alone = tileattn.forward(
            *map(sent, (q[:, :, start:end], k, v)),
            cu_seqlens_q=sent(np.array([0, end - start])),
            kv_lengths=sent(LENGTHS[b : b + 1]),
            block_table=sent(table[b : b + 1]),
            causal=True,
        )
        own = found.out[:, :, start:end], found.lse[:, :, start:end]
        assert bits(own) == bits(alone[:2])


LONG = np.array([4090, 1, 0, 2500, 1025, 33, 4090])
FEW = np.array([0, 1, 5, 6, 6, 10, 50, 52])  # of queries: some share keys with 16 rows or fewer


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.int8], ids=str)
def test_packed_sequences_over_long_caches(dtype: Any, name: str) -> None:
    """Those with few rows are split. Each has the bits that it has alone."""
    rng, D, page = np.random.default_rng(8), 64, 16
    given: dict[str, Any] = dict(OPTIONS[name])
    q = rng.normal(size=(1, HQ, int(FEW[-1]), D)).astype(np.float16 if dtype is np.int8 else dtype)
    shape = len(LONG), HKV, 4096, D
    if dtype is np.int8:
        k, v = (rng.integers(-128, 128, shape).astype(np.int8) for _ in "kv")
        given |= {"k_descale": 0.02, "v_descale": 0.01}
    else:
        k, v = (rng.normal(size=shape).astype(dtype) for _ in "kv")
    spare = 9 if dtype is np.int8 else np.nan
    (keys, table), (values, _) = (paged(x, LONG, page, spare) for x in (k, v))
    options: dict[str, Any] = {n: sent(x) for n, x in given.items()}

    def forward(rows: Any, entries: slice, ends: Any) -> Any:
        places = {"kv_lengths": LONG[entries], "block_table": table[entries], "cu_seqlens_q": ends}
        there = options | {n: sent(x) for n, x in places.items()}
        with poisoned():
            return tileattn.forward(sent(rows), sent(keys), sent(values), **there)

    found = forward(q, slice(None), FEW)
    for b, (start, end) in enumerate(pairwise(FEW)):
        own = type(found)(found.out[:, :, start:end], found.lse[:, :, start:end])
        one = q[:, :, start:end], k[b : b + 1], v[b : b + 1]
        also = given | {"kv_lengths": LONG[b : b + 1]}
        expected = reference.forward(*one, **also)
        assert_attention_close(host(own), expected, error_bound(*one, **also))
        alone = forward(q[:, :, start:end], slice(b, b + 1), np.array([0, end - start]))
        assert bits(own) == bits(alone)
