"""Calls that start in a larger one: on the GPU they drop, score and mask as the whole does."""

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.arrays import Given, normal
from tests.on_gpu import check, host, needs_gpu, sent, sent_options
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

BF16 = ml_dtypes.bfloat16
B, HQ, HKV, NQ, NK = 2, 4, 2, 197, 333
ALIGNED, ANY = (0, 2, 48, 128), np.array([(1, 0, 5, 1000), (0, 3, 24, 7)])
TABLE = np.random.default_rng(3).standard_normal((HQ, 211)).astype(np.float32)


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, (i - j) % 211] * (b + 1)


def stripes(b: Any, h: Any, i: Any, j: Any, _: Any) -> Any:
    return ((i + 3 * j + h + b) % 5 != 0) & (abs(i - j + 50) < 900)


DROPOUT: dict[str, Any] = {"dropout_p": 0.3, "seed": 2**40 + 9}
FUNCTIONS: dict[str, Any] = {"score_mod": relative, "mask_mod": stripes, "aux": (TABLE,)}
BIAS: dict[str, Any] = {
    "bias": np.random.default_rng(4).standard_normal((1, 1, NQ, NK)).astype(np.float32)
}


def arrays(dtype: Any, D: int, Nq: int = NQ, Nk: int = NK) -> Given:
    return normal((B, HQ, HKV, Nq, Nk, D, D), dtype)


@pytest.mark.parametrize("origin", [ALIGNED, ANY], ids=["aligned", "any"])
@pytest.mark.parametrize(
    ("dtype", "D", "options"),
    [
        (BF16, 64, DROPOUT),
        (BF16, 64, FUNCTIONS),
        (BF16, 128, DROPOUT | FUNCTIONS | BIAS),
        (BF16, 192, DROPOUT),
        (np.float32, 64, DROPOUT | FUNCTIONS | BIAS),
        (np.float64, 32, DROPOUT),
        (np.float32, 264, DROPOUT | {n: FUNCTIONS[n] for n in ("mask_mod", "aux")}),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else getattr(x, "__name__", str(x)),
)
def test_both_passes(dtype: Any, D: int, options: dict[str, Any], origin: Any) -> None:
    """Hopper's kernels, narrow and wide, the generic and the naive ones, and those of gradients."""
    check(arrays(dtype, D), options | {"origin": origin}, deterministic=True)


@pytest.mark.parametrize("Nq", [1, 40])
def test_few_queries_over_many_keys(Nq: int) -> None:
    """Keys are cut into splits."""
    q, k, v, _ = arrays(BF16, 64, Nq, 3000)
    options: dict[str, Any] = FUNCTIONS | {"origin": ANY, "kv_lengths": [3000, 1234]}
    found = host(tileattn.forward(*map(sent, (q, k, v)), **sent_options(options)))
    bounds = error_bound(q, k, v, **options)
    assert_attention_close(found, reference.forward(q, k, v, **options), bounds)


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=lambda x: x.__name__)
def test_blocks_drop_what_the_whole_drops(dtype: Any) -> None:
    """With the identity for values the output is zero where an entry is dropped."""
    whole, size = (B, HQ, 300, 260), 64
    kept = tileattn.dropout_mask(whole, **DROPOUT)
    q, k = (sent(np.zeros((1, 2, n, 64), dtype)) for n in (100, size))
    v = sent(np.broadcast_to(np.eye(size), (1, 2, size, size)).astype(dtype))
    for i, j in ((0, 0), (16, 64), (48, 8), (200, 196), (31, 101)):
        out, _ = tileattn.forward(q, k, v, origin=(1, 2, i, j), **DROPOUT)
        expected = kept[1:, 2:, i : i + 100, j : j + size]
        np.testing.assert_array_equal(out.get().astype(np.float32) > 0, expected)


def test_blocks_join_to_the_whole() -> None:
    """By queries and keys, forward and backward, of float32."""
    q, k, v, dout = map(sent, arrays(np.float32, 64))
    options = sent_options(DROPOUT | FUNCTIONS)
    whole = tileattn.forward(q, k, v, **options)
    grads = tileattn.backward(dout, q, k, v, *whole, **options)
    sums = {n: np.zeros(x.shape) for n, x in zip("qkv", (q, k, v), strict=True)}
    daux = np.zeros(TABLE.shape)
    for i0, i1 in pairwise((0, 64, 131, NQ)):
        rows, parts = slice(i0, i1), []
        for j0, j1 in pairwise((0, 90, 224, NK)):
            keys = slice(j0, j1)
            block = options | {"origin": (0, 0, i0, j0)}
            cut = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            parts.append(tileattn.forward(*cut, **block))
            saved = whole.out[:, :, rows], whole.lse[:, :, rows]
            part = tileattn.backward(dout[:, :, rows], *cut, *saved, **block)
            sums["q"][:, :, rows] += part.dq.get()
            sums["k"][:, :, keys] += part.dk.get()
            sums["v"][:, :, keys] += part.dv.get()
            assert part.daux is not None
            daux += part.daux[0].get()
        # error_bound is for one call; here roundings of three calls and of merge add up.
        joined = tileattn.merge(*zip(*((x.out.get(), x.lse.get()) for x in parts), strict=True))
        np.testing.assert_allclose(joined.out, whole.out[:, :, rows].get(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(joined.lse, whole.lse[:, :, rows].get(), rtol=1e-5, atol=1e-5)
    assert grads.daux is not None
    expected = zip((*grads[:3], grads.daux[0]), (*sums.values(), daux), strict=True)
    for found, total in expected:
        assert np.linalg.norm(found.get() - total) < 1e-5 * np.linalg.norm(total)


def test_packed_sequences_have_their_own() -> None:
    queries, keys = np.array([0, 70, 70, 197]), np.array([0, 130, 139, 333])
    q, k, v, dout = (x[0] for x in arrays(BF16, 64))
    given = DROPOUT | {"origin": [(0, 0, 16, 32), (4, 1, 3, 9), (2, 0, 5, 1000)]}
    given |= {"cu_seqlens_q": queries, "cu_seqlens_k": keys}
    check((q, k, v, dout), given)
