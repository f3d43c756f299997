"""Packed sequences on every backend that takes them."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from numpy.typing import NDArray

from tests.conftest import Runner
from tests.contract.test_backends import check
from tileattn.backends.cupy import describe
from tileattn.dtypes import accum_dtype
from tileattn.testing import AttentionCase, problems

pytestmark = pytest.mark.usefixtures("one_blas_thread")

Array = NDArray[Any]

HQ, HKV, D, DV = 4, 2, 24, 20
QUERIES, KEYS = [45, 0, 133, 1, 70, 3], [90, 4, 140, 40, 0, 65]
CU_Q, CU_K = (np.cumsum([0, *lengths]) for lengths in (QUERIES, KEYS))
LENGTHS = np.array([60, 0, 140, 39, 0, 65])
SLOPES = np.random.default_rng(1).random((len(KEYS), HQ))
TABLE = np.random.default_rng(2).normal(size=(HQ, 12))


def by_distance(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    """Read another element for each sequence."""
    return s + table[h, (i - j + b) % 12]


def near(b: Any, h: Any, i: Any, j: Any) -> Any:  # noqa: ARG001 - a mask_mod's
    """Let the queries of later sequences see further."""
    return abs(i - j) < 20 + b


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"kv_lengths": LENGTHS, "window": (30, 4), "softcap": 3.0},
    "offsets": {"q_offset": [0, 3, -20, 7, 1, 40], "causal": True, "alibi_slopes": SLOPES},
    "sinks": {"sinks": np.linspace(-1, 1, HQ), "alibi_slopes": SLOPES[0]},
    "function": {"score_mod": by_distance, "aux": (TABLE,)},
    "mask": {"mask_mod": near},
}


def able(runner: Runner, options: dict[str, Any]) -> None:
    q, k, v, _ = arrays(np.float64)
    reason = runner.why_not(q, k, v, packed(options))
    if reason is not None:
        pytest.skip(f"{runner.name}: {reason}")


def arrays(dtype: Any) -> list[Array]:
    rng = np.random.default_rng(0)
    shapes = (HQ, CU_Q[-1], D), (HKV, CU_K[-1], D), (HKV, CU_K[-1], DV), (HQ, CU_Q[-1], DV)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def packed(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}


# Each option with float16, and those that compile nothing of their own with every dtype.
CASES = [
    pytest.param(options, dtype, id=f"{name}-{np.dtype(dtype)}", marks=[pytest.mark.slow] * (n > 0))
    for name, options in OPTIONS.items()
    for n, dtype in enumerate([np.float16, np.float32, np.float64])
    if n == 0 or name not in ("function", "mask")
]


@pytest.mark.parametrize(("options", "dtype"), CASES)
def test_packed_sequences(runner: Runner, options: dict[str, Any], dtype: Any) -> None:
    able(runner, options)
    q, k, v, dout = arrays(dtype)
    dlse = np.random.default_rng(3).normal(size=q.shape[:2]).astype(accum_dtype(q.dtype))
    check(runner, AttentionCase(q, k, v, dout, dlse, packed(options)))


# In parts, for processes that work side by side.
@pytest.mark.parametrize(
    "_part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))]
)
@settings(max_examples=10)
@given(case=problems(packed=True))
def test_any_packed_sequences(runner: Runner, case: AttentionCase, _part: int) -> None:
    able(runner, {})
    assume(runner.why_not(case.q, case.k, case.v, case.options) is None)
    check(runner, case)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_has_the_bits_that_it_has_alone(
    backend: Runner, causal: bool, dtype: Any
) -> None:
    options: dict[str, Any] = {"causal": causal}
    able(backend, options)
    if backend.name == "llvm" and dtype is ml_dtypes.bfloat16:
        pytest.skip("llvm: packed sequences of bfloat16 are multiplied in float32, as docs say")
    on_hopper = backend.name == "cupy" and describe.device_of(0).arch == "sm_90a"
    if on_hopper and dtype is np.float32:
        pytest.skip("Hopper: the lengths of an unpacked call choose its kernels, as docs say")
    q, k, v, dout = arrays(dtype)
    k[0, CU_K[3]], v[1, CU_K[4] - 1] = np.inf, np.nan  # of one sequence
    q[:, CU_Q[2]] *= 30
    attention = backend.forward(q, k, v, **packed(options))
    grads = backend.backward(dout, q, k, v, *attention, **packed(options))
    for rows, keys in zip(*(spans(x) for x in (CU_Q, CU_K)), strict=True):
        own = q[:, rows], k[:, keys], v[:, keys]
        alone = backend.forward(*own, **options)
        of_alone = backend.backward(dout[:, rows], *own, *alone, **options)
        for found, expected in (
            (attention.out[:, rows], alone.out),
            (attention.lse[:, rows], alone.lse),
            (grads.dq[:, rows], of_alone.dq),
            (grads.dk[:, keys], of_alone.dk),
            (grads.dv[:, keys], of_alone.dv),
        ):
            np.testing.assert_array_equal(found.astype(np.float64), expected.astype(np.float64))


def spans(offsets: Array) -> list[slice]:
    return list(map(slice, offsets[:-1], offsets[1:]))
