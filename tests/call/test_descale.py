"""Which quantised keys and values are valid, and how their descales are viewed."""

import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tests.device_array import DeviceArray
from tileattn import UnsupportedError
from tileattn.call.parse import parse
from tileattn.dtypes import CACHE_DTYPES, FLOAT8_E4M3FN

Array = NDArray[Any]

B, HQ, HKV, NQ, NK, D = 3, 4, 2, 5, 7, 8
Q = np.zeros((B, HQ, NQ, D), np.float16)
K = np.zeros((B, HKV, NK, D), np.int8)
ONES: dict[str, Any] = {"k_descale": 1.0, "v_descale": 1.0}
PAGED: dict[str, Any] = {"block_table": [[0], [1], [2]], "kv_lengths": [7, 1, 0]}
PACKED: dict[str, Any] = {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 3, 7]}


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_a_problem_has_the_dtypes_of_queries_and_of_keys(dtype: np.dtype[Any]) -> None:
    problem, _ = parse(Q, K.astype(dtype), K.astype(dtype), ONES)
    assert (problem.dtype, problem.kv_dtype, problem.is_quantised) == (Q.dtype, dtype, True)
    assert problem.kind.kv_dtype == dtype
    assert problem.enabled_options == {"k_descale", "v_descale"}
    assert problem.of(problem.kind, problem.numbers) == problem
    plain, operands = parse(Q, K.astype(Q.dtype), K.astype(Q.dtype), {})
    assert (plain.kv_dtype, plain.is_quantised) == (None, False)
    assert operands.k_descale is None


@pytest.mark.parametrize(
    ("q", "k", "descale", "options", "shape", "of_tokens"),
    [
        (Q, K, 0.5, {}, (B, HKV, 1), False),
        (Q, K, 0, {}, (B, HKV, 1), False),
        (Q, K, np.float64(0.5), {}, (B, HKV, 1), False),
        (Q, K, np.array(0.5), {}, (B, HKV, 1), False),
        (Q, K, ones(), {}, (B, HKV, 1), False),
        (Q, K, ones(HKV), {}, (B, HKV, 1), False),
        (Q, K, ones(B, HKV), {}, (B, HKV, 1), False),
        (Q, K, ones(B, HKV, NK), {}, (B, HKV, NK), True),
        (Q[0], K[0], ones(1, HKV), {}, (1, HKV, 1), False),
        (Q[0], K[0], ones(HKV, NK), {}, (1, HKV, NK), True),
        (Q[0, 0], K[0, 0], ones(1), {}, (1, 1, 1), False),
        (Q[0, 0], K[0, 0], ones(NK), {}, (1, 1, NK), True),
        (Q, K, ones(B, HKV), PAGED, (B, HKV, 1), False),
        (Q, K, ones(B, HKV, NK), PAGED, (B, HKV, NK), True),
        (Q[0], K[0], ones(2, HKV), PACKED, (2, HKV, 1), False),
        (Q[0], K[0], ones(HKV, NK), PACKED, (1, HKV, NK), True),
        (Q[:1], K[:1], ones(1, HKV, NK), PACKED, (1, HKV, NK), True),
        # Two sequences of two keys and two heads: the shape fits both.
        (Q[0], K[0, :, :4], ones(2, 2), PACKED | {"cu_seqlens_k": [0, 2, 4]}, (2, 2, 1), False),
        (Q[0], K[0, :, :2], ones(2, 2), PACKED | {"cu_seqlens_k": [0, 1, 2]}, (1, 2, 2), True),
    ],
)
def test_descales_are_viewed_with_three_axes(
    q: Array,
    k: Array,
    descale: Any,
    options: dict[str, Any],
    shape: tuple[int, ...],
    of_tokens: bool,
) -> None:
    problem, operands = parse(q, k, k, {**options, "k_descale": 1.0, "v_descale": descale})
    found = operands.v_descale
    assert (found.shape, found.dtype) == (shape, np.float32)
    assert problem.token_descales == ({"v_descale"} if of_tokens else set())
    if isinstance(descale, np.ndarray) and descale.dtype == np.float32 and descale.shape:
        assert np.shares_memory(found, descale)
    assert (found == np.ravel(descale)[0]).all()


def test_any_strides_are_viewed() -> None:
    wide = np.random.default_rng(0).random((B, NK, HKV, 2)).astype(np.float32)
    descale = wide[:, ::-1, :, 1].swapaxes(1, 2)
    _, operands = parse(Q, K, K, {"k_descale": descale, "v_descale": 1.0})
    assert operands.k_descale.strides == descale.strides
    assert np.shares_memory(operands.k_descale, wide)


@pytest.mark.parametrize(
    "descale",
    [0.5, *(np.full(x, np.nan, np.float32) for x in ((), (HKV,), (B, HKV), (B, HKV, NK)))],
    ids=lambda x: str(np.shape(x)),
)
def test_values_on_a_device_are_not_read(descale: Any) -> None:
    q, k = DeviceArray(Q), DeviceArray(K)
    given = descale if isinstance(descale, float) else DeviceArray(descale)
    _, operands = parse(q, k, k, {"k_descale": given, "v_descale": 1.0})
    assert isinstance(operands.k_descale, DeviceArray)
    assert isinstance(operands.v_descale, DeviceArray)
    assert operands.v_descale.shape == (B, HKV, 1)
    assert operands.k_descale.shape[:2] == (B, HKV)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"q": Q.astype(np.float64)},
            TypeError,
            "q must have dtype float16, bfloat16 or float32 with k of dtype int8; got float64",
        ),
        ({"v": K.astype(Q.dtype)}, TypeError, "v must have the dtype of k, int8; got float16"),
        ({"k": K.astype(Q.dtype)}, TypeError, "v must have the dtype of k, float16; got int8"),
        (
            {"k": K.astype(FLOAT8_E4M3FN)},
            TypeError,
            "v must have the dtype of k, float8_e4m3fn; got int8",
        ),
        ({"k_descale": None}, ValueError, "k_descale must be given with k of dtype int8; got None"),
        ({"v_descale": None}, ValueError, "v_descale must be given with k of dtype int8; got None"),
        (
            {"k": K.astype(Q.dtype), "v": K.astype(Q.dtype), "k_descale": None},
            ValueError,
            "v_descale must be None with k of dtype float16; it goes with float8_e4m3fn or int8",
        ),
        (
            {"k_descale": ones(4)},
            ValueError,
            "k_descale must be a number, or have shape (Hkv,) = (2,), (B, Hkv) = (3, 2) or "
            "k.shape[:-1] = (3, 2, 7); got (4,)",
        ),
        (
            {"v_descale": ones(1, 2), **PAGED},
            ValueError,
            "v_descale must be a number, or have shape (Hkv,) = (2,), (B, Hkv) = (3, 2) or "
            "(pages, Hkv, page) = (3, 2, 7); got (1, 2)",
        ),
        ({"k_descale": np.ones(2)}, TypeError, "k_descale must have dtype float32; got float64"),
        (
            {"k_descale": [1.0, 1.0]},
            TypeError,
            "k_descale must be a number or a NumPy array; got [1.0, 1.0]",
        ),
        ({"k_descale": True}, TypeError, "k_descale must be a number from 0 to the largest of"),
        ({"k_descale": -0.5}, ValueError, "k_descale must be a number from 0 to"),
        ({"v_descale": np.nan}, ValueError, "v_descale must be a number from 0 to"),
        ({"v_descale": np.inf}, ValueError, "v_descale must be a number from 0 to"),
        ({"v_descale": 1e39}, ValueError, "v_descale must be a number from 0 to"),
        (
            {"k_descale": -ones(B, HKV)},
            ValueError,
            "k_descale must hold finite numbers that are not negative; got -1.0",
        ),
        (
            {"v_descale": ones(HKV) * np.inf},
            ValueError,
            "v_descale must hold finite numbers that are not negative; got inf",
        ),
    ],
)
def test_what_is_refused(changed: dict[str, Any], error: type, message: str) -> None:
    call = {"q": Q, "k": K, "v": K, **ONES, **changed}
    for _ in range(2):
        with pytest.raises(error, match=re.escape(message)):
            tileattn.forward(**call)


def test_there_are_no_gradients() -> None:
    message = (
        "does not support k_descale and v_descale: caches of 8 bits have no gradients; multiply k "
        "and v by their descales, and pass the products in the dtype of q"
    )
    out, lse = tileattn.forward(Q, K, K, **ONES)
    for call in (
        lambda: tileattn.vjp(Q, K, K, **ONES),
        lambda: tileattn.backward(out, Q, K, K, out, lse, **ONES),
        lambda: tileattn.reference.backward(out, Q, K, K, **ONES),
        lambda: tileattn.testing.error_bound(Q, K, K, out, **ONES),
    ):
        with pytest.raises(UnsupportedError, match=message):
            call()


@pytest.mark.parametrize("backend", ["llvm", "cupy"])
def test_a_backend_that_refuses_says_which_does_not(backend: str) -> None:
    problem, _ = parse(Q, K, K, ONES)
    from tileattn.backends import registry

    reason = registry.get(backend).why_not(problem)
    assert reason is None or "k_descale and v_descale" in reason
