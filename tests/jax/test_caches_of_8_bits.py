"""JAX arrays of 8 bits as keys and values."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tileattn import UnsupportedError, reference
from tileattn.dtypes import CACHE_DTYPES
from tileattn.testing import assert_attention_close, error_bound

jax = pytest.importorskip("jax", reason="it takes arrays of JAX: pip install jax")

from tileattn.jax import attention  # noqa: E402 - after the skip

B, HQ, HKV, NQ, NK, D = 2, 4, 2, 5, 17, 16


def call(dtype: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((B, HQ, NQ, D)).astype(ml_dtypes.bfloat16)
    k, v = (30 * rng.standard_normal((2, B, HKV, NK, D))).astype(np.float32).astype(dtype)
    descale = rng.uniform(0, 0.05, (B, HKV, NK)).astype(np.float32)
    return q, k, v, {"k_descale": descale, "v_descale": 0.04}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_arrays_of_8_bits(dtype: np.dtype[Any], jitted: bool) -> None:
    q, k, v, options = call(dtype)

    def run(q: Any, k: Any, v: Any, k_descale: Any) -> Any:
        return attention(q, k, v, return_lse=True, k_descale=k_descale, v_descale=0.04)

    found = (jax.jit(run) if jitted else run)(q, k, v, options["k_descale"])
    expected = reference.forward(q, k, v, **options)
    assert_attention_close(tuple(found), expected, error_bound(q, k, v, **options))


def test_there_are_no_gradients() -> None:
    q, k, v, options = call(np.int8)
    with pytest.raises(
        UnsupportedError, match=r"jax\.grad does not support k_descale and v_descale"
    ):
        jax.grad(lambda q: attention(q, k, v, **options).sum())(jax.numpy.asarray(q))
    with pytest.raises(UnsupportedError, match="k_descale must not be differentiated"):
        jax.grad(lambda x: attention(q, k, v, k_descale=x, v_descale=1.0).sum())(
            jax.numpy.ones(HKV)
        )


@pytest.mark.parametrize("wrong", [-1.0, np.float32(np.nan), np.full(HKV, np.inf, np.float32)])
def test_values_on_the_host_are_validated(wrong: Any) -> None:
    q, k, v, options = call(np.int8)
    with pytest.raises(ValueError, match="v_descale must "):
        attention(q, k, v, **(options | {"v_descale": wrong}))
