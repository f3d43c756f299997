"""Sizes of zero on any axes, together: empty or zero results on every backend, pages too."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tests.conftest import Runner
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]

SIZES: list[tuple[int, ...]] = list(product((0, 2), (0, 4), (0, 3), (0, 5), (0, 8), (0, 6)))


def arrays(B: int, Hq: int, Nq: int, Nk: int, D: int, Dv: int) -> tuple[list[Array], Array]:
    """q, k, v and dout, and dlse."""
    rng = np.random.default_rng(0)
    shapes = ((B, Hq, Nq, D), (B, Hq // 2, Nk, D), (B, Hq // 2, Nk, Dv), (B, Hq, Nq, Dv))
    drawn = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    return drawn, rng.normal(size=(B, Hq, Nq)).astype(np.float32)


def option_sets(B: int, Hq: int, Nq: int, Nk: int) -> dict[str, dict[str, Any]]:
    ones = np.ones(Hq, np.float32)
    return {
        "plain": {},
        "masks": {
            "causal": True,
            "mask": np.ones((B, 1, Nq, Nk), bool),
            "block_mask": tileattn.BlockMask.from_mask(np.tri(Nq, Nk, dtype=bool), (3, 4)),
        },
        "scores": {
            "sinks": ones,
            "alibi_slopes": ones,
            "bias": np.ones((Hq, Nq, Nk), np.float32),
            "softcap": 2.0,
            "dropout_p": 0.3,
        },
        "functions": {
            "score_mod": lambda s, b, h, i, j, t: s + t[h] * (i - j) + b,
            "mask_mod": lambda b, h, i, j, _t: (i + j) % 3 != b + h,
            "aux": (ones,),
        },
        "no keys": {"kv_lengths": 0, "sinks": ones},
    }


@pytest.mark.parametrize("name", option_sets(1, 1, 1, 1))
def test_both_passes(backend: Runner, name: str) -> None:
    for sizes in SIZES:
        (q, k, v, dout), dlse = arrays(*sizes)
        options = option_sets(*sizes[:4])[name]
        attention = backend.forward(q, k, v, **options)
        bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
        assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
        grads = backend.backward(dout, q, k, v, *backend._sent(attention), dlse=dlse, **options)
        expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
        assert_attention_close(grads, expected, bounds)


@pytest.mark.parametrize("pages", [0, 3])
@pytest.mark.parametrize("columns", [0, 2])
def test_pages(backend: Runner, pages: int, columns: int) -> None:
    for B, Hq, Nq, page, D, Dv in SIZES:
        rng = np.random.default_rng(1)
        q = rng.normal(size=(B, Hq, Nq, D)).astype(np.float32)
        k = rng.normal(size=(pages, Hq // 2, page, D)).astype(np.float32)
        v = rng.normal(size=(pages, Hq // 2, page, Dv)).astype(np.float32)
        most = columns * page if pages else 0
        options: dict[str, Any] = {
            "block_table": np.zeros((B, columns), np.int32),
            "kv_lengths": np.minimum(np.arange(B) * 7, most),
            "causal": True,
        }
        if backend.why_not(q, k, v, options) is not None:
            continue
        found = backend.forward(q, k, v, **options)
        bounds = error_bound(q, k, v, **options)
        assert_attention_close(found, reference.forward(q, k, v, **options), bounds)


def test_what_would_run_is_explained(cpu_backend: str) -> None:
    for sizes in SIZES:
        (q, k, v, _), _ = arrays(*sizes)
        assert tileattn.explain(q, k, v, causal=True).backend == cpu_backend
