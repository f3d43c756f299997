"""The caller's own functions on the GPU, in both passes, against the oracle."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.arrays import normal
from tests.gallery import calls
from tests.more_functions import FROM_THE_END, OPERATIONS, options_of
from tests.on_gpu import bits, check, needs_gpu, poisoned, sent, sent_options
from tileattn import UnsupportedError

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

NAMES = sorted(calls(1, 1, 1, 1))
SIZES = [(2, 4, 2, 67, 93, 32, 48), (1, 2, 1, 270, 517, 64, 64)]
ALL = ("q", "k", "v")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda x: x.__name__)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_gallery(name: str, sizes: Any, dtype: Any) -> None:
    B, Hq, _, Nq, Nk, *_ = sizes
    floats = np.float64 if dtype == np.float64 else np.float32
    check(normal(sizes, dtype), calls(B, Hq, Nq, Nk, floats)[name])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda x: x.__name__)
@pytest.mark.parametrize("name", [*OPERATIONS, *FROM_THE_END])
def test_functions_beyond_the_gallery(name: str, dtype: Any) -> None:
    check(normal(SIZES[0], dtype), options_of(name, dtype))


def test_captured_arrays_are_parameters() -> None:
    q, k, v, dout = map(sent, normal(SIZES[0], np.float32))
    table = sent(np.random.default_rng(0).normal(size=(4, 160)).astype(np.float32))

    def with_aux(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        return s + t[h, i - j]

    attention, pullback = tileattn.vjp(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j])
    expected, back = tileattn.vjp(q, k, v, score_mod=with_aux, aux=(table,))
    assert bits(attention) == bits(expected)
    assert bits(pullback(dout).daux) == bits(back(dout).daux)


MORE: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "dropout_p": 0.2, "seed": 3},
    "sinks": {"sinks": np.linspace(-1, 2, 4), "softcap": 4.0, "kv_lengths": [93, 50]},
    "bias": {"bias": np.random.default_rng(2).normal(size=(4, 1, 93)), "window": (40, 9)},
    "whole bias": {"bias": np.random.default_rng(2).normal(size=(2, 4, 67, 93))},
    "mask": {"mask": np.random.default_rng(4).random((1, 4, 67, 93)) < 0.7},
    "offset": {"q_offset": [3, -9], "causal": True, "alibi_slopes": np.linspace(0.1, 1, 4)},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("more", MORE.values(), ids=MORE.keys())
@pytest.mark.parametrize("name", ["soft_cap", "gaussian", "masked_score", "tree", "scattered"])
def test_with_other_options(name: str, more: dict[str, Any], deterministic: bool) -> None:
    options = calls(2, 4, 67, 93, np.float32)[name] | more
    check(normal(SIZES[0], np.float32), options, deterministic=deterministic)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=lambda x: x.__name__)
@pytest.mark.parametrize("name", ["transformer_xl", "masked_score", "documents", "tree"])
def test_the_naive_kernels(name: str, dtype: Any) -> None:
    """They compute no gradient of ``aux``."""
    sizes = (2, 4, 2, 67, 93, 300, 264)
    options = calls(2, 4, 67, 93, np.float32)[name]
    check(normal(sizes, dtype), options, without=("daux",), wrt=ALL)


WITH_HOPPER = [
    (SIZES[0], np.float32),
    (SIZES[0], np.float16),
    ((2, 6, 2, 167, 293, 64, 64), ml_dtypes.bfloat16),
    ((2, 6, 2, 300, 700, 128, 128), ml_dtypes.bfloat16),
]
"""Sizes and dtypes of the generic kernels, and of those for Hopper."""


@pytest.mark.parametrize(("sizes", "dtype"), WITH_HOPPER, ids=str)
def test_a_block_mask_and_both_functions(sizes: Any, dtype: Any) -> None:
    B, Hq, _, Nq, Nk, *_ = sizes
    own = calls(B, Hq, Nq, Nk, np.float32)
    for name, size in (("scattered", (32, 32)), ("neighbourhood", (128, 128))):
        block_mask = tileattn.BlockMask.from_predicate(
            lambda b, h, i, j: (i // 16 + j // 16) % 3 > 0, (B, Hq, Nq, Nk), block_size=size
        )
        options = own["soft_cap"] | own[name] | {"block_mask": block_mask}
        check(normal(sizes, dtype), options)


@pytest.mark.parametrize(("sizes", "dtype"), WITH_HOPPER, ids=str)
def test_what_a_function_hides_reaches_nothing(sizes: Any, dtype: Any) -> None:
    """NaN in keys that no query sees, and in scores and derivatives of hidden pairs."""

    def hides(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        return np.where(j % 3 == 0, -np.inf, s * t[j])

    def sees(b: Any, h: Any, i: Any, j: Any, t: Any) -> Any:
        return j % 4 != 0

    q, k, v, dout = normal(sizes, dtype)
    keys = np.arange(sizes[4])
    hidden = keys % 3 * (keys % 4) == 0
    table = np.linspace(1, 2, sizes[4]).astype(np.float32)
    k[:, :, hidden], v[:, :, hidden], table[hidden] = np.nan, np.inf, np.nan
    check((q, k, v, dout), {"score_mod": hides, "mask_mod": sees, "aux": (table,)})


def test_visible_nan_shows() -> None:
    q, k, v, dout = normal(SIZES[0], np.float32)
    q[0, 1, 5, 0] = k[1, 0, 7, 3] = v[0, 1, 11, 2] = np.nan
    own = calls(2, 4, 67, 93, np.float32)
    for name in ("soft_cap", "masked_score", "sliding_window"):
        check((q, k, v, dout), own[name])


def test_aux_of_any_dtype_and_strides() -> None:
    rng = np.random.default_rng(6)
    whole = rng.normal(size=(186, 8))

    def score(s: Any, b: Any, h: Any, i: Any, j: Any, x: Any, y: Any, z: Any) -> Any:
        return s + x[j, h] * y[j] + z

    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        x = whole.astype(dtype)[::-2, ::2]
        options = {
            "score_mod": score,
            "aux": (x, np.arange(93, dtype=np.uint8), np.array(3, np.int16)),
        }
        check(normal(SIZES[0], np.float32), options)


def test_the_same_bits_again() -> None:
    q, k, v, dout = (sent(x) for x in normal(SIZES[1], np.float16))
    options = sent_options(calls(1, 2, 270, 517, np.float32)["gaussian"])
    found = []
    for _ in range(3):
        attention = tileattn.forward(q, k, v, **options)
        grads = tileattn.backward(dout, q, k, v, *attention, wrt=ALL, deterministic=True, **options)
        found.append(bits((*attention, *grads)))
    assert found[0] == found[1] == found[2]


def test_gradients_of_aux_are_refused_by_naive_kernels() -> None:
    options = sent_options(calls(2, 4, 67, 93, np.float32)["relative_bias"])
    q, k, v, dout = map(sent, normal((2, 4, 2, 67, 93, 300, 264), np.float32))
    attention = tileattn.forward(q, k, v, **options)
    with pytest.raises(UnsupportedError, match="gradients of aux with head dimensions above 256"):
        tileattn.backward(dout, q, k, v, *attention, **options)


def twice(s: Any, b: Any, h: Any, i: Any, j: Any, t: Any, u: Any) -> Any:
    """Read one array at two places, and another at pairs of keys and queries."""
    return s * t[h, np.minimum(i, 40)] + t[h, j % 17] + np.tanh(u[i, j]) + u[j % 5, i % 7]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda x: x.__name__)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_aux_at_several_places(sizes: Any, dtype: Any) -> None:
    _, Hq, _, Nq, Nk, *_ = sizes
    rng = np.random.default_rng(5)
    aux = rng.normal(size=(Hq, 50)).astype(np.float32), rng.normal(size=(Nq, Nk))
    check(normal(sizes, dtype), {"score_mod": twice, "aux": aux, "causal": True})


@pytest.mark.parametrize("name", ["relative_bias", "transformer_xl", "temperature", "t5_bias"])
def test_gradients_of_aux_have_the_same_bits_again(name: str) -> None:
    sizes = (3, 4, 2, 900, 1100, 64, 64)
    q, k, v, dout = map(sent, normal(sizes, np.float16))
    options = sent_options(calls(3, 4, 900, 1100, np.float32)[name])
    attention = tileattn.forward(q, k, v, **options)
    found = set()
    for _ in range(20):
        with poisoned():
            grads = tileattn.backward(dout, q, k, v, *attention, **options)
        found.add(tuple(bits(grads.daux)))
    assert len(found) == 1
