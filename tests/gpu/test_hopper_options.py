"""Hopper's kernels with lists of tiles and with the caller's own functions, in both passes."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests import on_gpu
from tests.arrays import normal
from tests.gallery import calls
from tests.gpu.hopper import (
    DTYPES,
    HQ,
    LENGTHS,
    MASKS,
    OPTIONS,
    SQUARE,
    B,
    arrays,
    both,
    check,
    filled,
    runs_backward,
    runs_forward,
)
from tests.on_gpu import bits, host, needs_gpu, poisoned, sent, sent_options
from tileattn import reference
from tileattn.testing import assert_attention_close, error_bound

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread", "on_hopper")]

NAMES = sorted(calls(1, 1, 1, 1))
WRT = ("q", "k", "v")


def check_functions(given: Any, options: dict[str, Any], *, deterministic: bool = False) -> None:
    """Compare both passes with the oracle, all gradients but those of sinks."""
    q, k, v, dout = map(sent, given)
    there = sent_options(options)
    assert runs_forward(q, k, v, **there)
    assert runs_backward(q, k, v, dout, **there) or (q.shape[-1] > 128 and "bias" in options)
    wrt = (*WRT, *(name for name in ("bias", "aux") if name in options))
    on_gpu.check(given, options, without=("dsinks",), wrt=wrt, deterministic=deterministic)


# --- lists of tiles -----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", ["plain", "causal", "window", "lengths", "all"])
@pytest.mark.parametrize(
    ("D", "Dv"), [*SQUARE, (80, 80), (192, 128), (192, 192), (256, 192), (256, 256)]
)
def test_block_masks(D: int, Dv: int, options: str, mask: str) -> None:
    Nq, Nk = 420, 700
    there = filled(OPTIONS[options], Nk)
    check(arrays(DTYPES[1], D, Dv, Nq, Nk), block_mask=MASKS[mask](Nq, Nk), **there)


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", ["plain", "causal"])
@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, (192, 128), (256, 256)])
def test_block_masks_over_many_work_tiles(D: int, Dv: int, options: str, mask: str) -> None:
    """Each dq tile is begun by the first block of keys that it is left to."""
    Nq, Nk = 500, 1100
    given = arrays(DTYPES[0], D, Dv, Nq, Nk)
    there = filled(OPTIONS[options], Nk) | {"block_mask": MASKS[mask](Nq, Nk)}
    first = check(given, deterministic=True, **there)
    bounds = error_bound(*given, **there)
    for _ in range(5):
        assert bits(both(given, deterministic=True, **there)[1]) == bits(first)
        assert_attention_close(both(given, **there)[1], first, bounds)


@pytest.mark.parametrize(("Nq", "Nk"), LENGTHS)
@pytest.mark.parametrize("mask", MASKS)
def test_block_masks_at_lengths_that_no_tile_divides(mask: str, Nq: int, Nk: int) -> None:
    check(arrays(DTYPES[1], 64, 64, Nq, Nk), block_mask=MASKS[mask](Nq, Nk))


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("mask", ["few", "dense", "documents"])
@pytest.mark.parametrize(("D", "Dv"), [*SQUARE, (192, 128), (256, 256), (512, 320)])
def test_masked_out_values_do_not_matter(D: int, Dv: int, mask: str) -> None:
    Nq, Nk = 400, 600
    given = arrays(DTYPES[1], D, Dv, Nq, Nk)
    for n, x in enumerate(given):
        x[0, 1, 5 + 40 * n, 3] = (np.nan, np.inf)[n % 2]
    check(given, block_mask=MASKS[mask](Nq, Nk))


# --- functions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("D", "Dv", "dtype"), [(64, 64, 1), (128, 128, 0), (192, 128, 0), (256, 256, 1)]
)
@pytest.mark.parametrize("name", NAMES)
def test_the_gallery(name: str, D: int, Dv: int, dtype: int) -> None:
    Nq, Nk = 270, 517
    own = calls(B, HQ, Nq, Nk, np.float32)[name]
    check_functions(arrays(DTYPES[dtype], D, Dv, Nq, Nk), own, deterministic=D > 64)


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("options", ["causal", "window", "lengths", "all"])
@pytest.mark.parametrize("name", ["gaussian", "masked_score", "tree", "local_and_global"])
@pytest.mark.parametrize("D", [64, 128])
def test_with_other_options(D: int, name: str, options: str) -> None:
    Nq, Nk = 300, 700
    own = calls(B, HQ, Nq, Nk, np.float32)[name] | filled(OPTIONS[options], Nk)
    check_functions(arrays(DTYPES[1], D, D, Nq, Nk), own, deterministic=D == 64)


@pytest.mark.parametrize("factor", [1e3, -3e4])
def test_large_scores(factor: float) -> None:
    def scaled(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + factor * np.cos(j * 0.01)

    check_functions(arrays(DTYPES[1], 64, 64, 300, 500), {"score_mod": scaled})


@pytest.mark.parametrize("lowest", [-1e4, -1e9, float(np.finfo(np.float32).min), -np.inf])
@pytest.mark.parametrize("D", [64, 128])
def test_scores_that_stand_for_a_mask(D: int, lowest: float) -> None:
    """Also of whole rows: where all scores are equal the weights are."""

    def hidden(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return np.where((j < 200) & (i > 30) | (i % 7 == 3), lowest, s)

    check_functions(arrays(DTYPES[1], D, D, 300, 500), {"score_mod": hidden})


# --- masks, biases, dropout -----------------------------------------------------------------------


def dense(name: str, Nq: int, Nk: int) -> dict[str, Any]:
    """Options whose arrays have an entry for each pair, or broadcast to it."""
    rng = np.random.default_rng(7)
    mask = rng.random((B, 1, Nq, 2 * Nk)) < 0.7
    mask[:, :, Nq // 2] = False

    def normal(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    sinks = normal(HQ)
    some = mask[..., :Nk].copy()
    made: dict[str, dict[str, Any]] = {
        "dropout": {"dropout_p": 0.3, "seed": 7},
        "mask": {"mask": some},
        "odd mask": {"mask": mask[..., ::2], "causal": True},
        "padding": {"mask": mask[:, :, :1, :Nk], "window": (90, 20)},
        "queries": {"mask": mask[:, :, :, :1]},
        "bias": {"bias": normal(1, HQ, Nq, Nk).astype(np.float16)},
        "float bias": {"bias": normal(B, HQ, Nq, Nk), "causal": True},
        "bias of keys": {"bias": normal(HQ, 1, Nk), "mask": some},
        "bias of queries": {"bias": normal(B, 1, Nq, 1), "softcap": 2.0},
        "hides by a bias": {"bias": np.where(some, 0, -1e9).astype(np.float32)},
        "hides all by a bias": {"bias": np.full((1, 1, Nq, Nk), np.finfo(np.float32).min)},
        "all": {
            **{"mask": some, "bias": normal(1, HQ, Nq, Nk), "dropout_p": 0.2, "seed": 3},
            **{"softcap": 4.0, "causal": True, "sinks": sinks, "kv_lengths": [Nk, Nk // 2]},
        },
        "dropout and a function": {
            "dropout_p": 0.2,
            "score_mod": calls(1, 1, 1, 1)["alibi"]["score_mod"],
        },
    }
    return made[name]


DENSE = ["dropout", "mask", "odd mask", "padding", "queries", "bias", "float bias"]
DENSE += ["bias of keys", "bias of queries", "hides by a bias", "hides all by a bias", "all"]
DENSE += ["dropout and a function"]


@pytest.mark.parametrize(("Nq", "Nk"), [(129, 257), (300, 700)])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("name", DENSE)
def test_masks_biases_and_dropout(name: str, D: int, Nq: int, Nk: int) -> None:
    given = arrays(DTYPES[Nq % 2], D, D, Nq, Nk)
    check_functions(given, dense(name, Nq, Nk), deterministic=Nq > 200)


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("name", ["bias", "float bias", "bias of keys", "all"])
@pytest.mark.parametrize("D", [64, 128])
def test_biases_of_aligned_rows(D: int, name: str) -> None:
    """A warp of its own loads them, of work tiles one after the other."""
    given = arrays(DTYPES[1], D, D, 452, 904)
    check_functions(given, dense(name, 452, 904))


@pytest.mark.usefixtures("few_sms")
@pytest.mark.parametrize("name", ["dropout", "mask", "bias", "all"])
@pytest.mark.parametrize("D", [64, 128])
def test_many_work_tiles(D: int, name: str) -> None:
    given = arrays(DTYPES[1], D, D, 700, 900)
    check_functions(given, dense(name, 700, 900), deterministic=True)


@pytest.mark.parametrize("shape", [(B, HQ, 140, 264), (1, HQ, 140, 264), (1, 1, 1, 264)])
@pytest.mark.parametrize(("dtype", "D"), [(DTYPES[0], 64), (DTYPES[1], 128), (np.float32, 64)])
def test_dbias_and_dsinks_alone(dtype: Any, D: int, shape: tuple[int, ...]) -> None:
    """Without the gradients of q, k and v their kernels do not run, and the others are the same."""
    given = arrays(np.dtype(dtype), D, D, 140, 264)
    rng = np.random.default_rng(5)
    options: dict[str, Any] = {"bias": rng.normal(size=shape), "sinks": rng.normal(size=HQ)}
    options = {name: x.astype(np.float32) for name, x in options.items()}
    q, k, v, dout = map(sent, given)
    there = {name: sent(x) for name, x in options.items()}
    attention = tileattn.forward(q, k, v, **there)
    with poisoned():
        grads = tileattn.backward(dout, q, k, v, *attention, wrt=("bias", "sinks"), **there)
    assert grads.dq is grads.dk is grads.dv is None
    bounds = error_bound(*given, **options)
    expected = reference.backward(given[3], *given[:3], **options)
    assert_attention_close(host(grads), expected._replace(dq=None, dk=None, dv=None), bounds)


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["plain", "causal"])
@pytest.mark.parametrize("N", [49, 150])
@pytest.mark.parametrize("dtype", [DTYPES[1], np.float32])
def test_a_bias_that_many_batch_entries_share(dtype: Any, N: int, options: dict[str, Any]) -> None:
    """Thread blocks or batch entries have copies of dbias, which need not start at zero."""
    given = normal((21, 4, 2, N, N, 32, 40), np.dtype(dtype))
    bias = np.random.default_rng(3).normal(size=(1, 4, N, N)).astype(dtype)
    asked: Any = {"without": ("dsinks",), "wrt": (*WRT, "bias"), "deterministic": True}
    _, first = on_gpu.check(given, {"bias": bias, **options}, **asked)
    _, again = on_gpu.check(given, {"bias": bias, **options}, **asked)
    assert bits(first) == bits(again)


@pytest.mark.parametrize("name", ["dropout", "mask", "padding", "bias"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_what_is_not_finite(D: int, name: str) -> None:
    given = arrays(DTYPES[1], D, D, 300, 400)
    for n, x in enumerate(given):
        x[0, 1, 5 + 40 * n, 3] = (np.nan, np.inf)[n % 2]
    check_functions(given, dense(name, 300, 400))
