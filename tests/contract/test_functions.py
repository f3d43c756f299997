"""Score and mask functions of one's own, on every backend that takes them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.arrays import Sizes, normal
from tests.conftest import Runner
from tests.contract.test_backends import check
from tests.gallery import calls
from tests.more_functions import FROM_THE_END, OPERATIONS, options_of
from tileattn import BlockMask, reference
from tileattn.algorithm.scores import learned_elements
from tileattn.call.parse import parse
from tileattn.dtypes import DTYPES
from tileattn.testing import AttentionCase, assert_attention_close, error_bound, problems

pytestmark = pytest.mark.usefixtures("one_blas_thread")

SIZES = (2, 4, 2, 67, 93, 12, 20)
B, HQ, HKV, NQ, NK, D, DV = SIZES
GALLERY = calls(B, HQ, NQ, NK)
NAMES = sorted(GALLERY)
SCORES = [name for name in NAMES if "score_mod" in GALLERY[name]]


def able(runner: Runner, options: dict[str, Any], sizes: Sizes = SIZES) -> None:
    """Skip where the backend has no functions."""
    q, k, v, _ = normal(sizes)
    reason = runner.why_not(q, k, v, options)
    score_mod = parse(q, k, v, options)[0].score_mod
    if runner.name == "cupy" and score_mod is not None and learned_elements(score_mod):
        reason = "no gradients of aux; tests/gpu/test_functions.py has the others"
    if reason is not None:
        pytest.skip(f"{runner.name}: {reason}")


COMBINED = {
    "alone": {},
    "causal": {"causal": True, "dropout_p": 0.2, "seed": 3},
    "sinks": {"sinks": np.linspace(-1, 2, HQ), "softcap": 4.0, "kv_lengths": [93, 50]},
    "bias": {"bias": np.random.default_rng(2).normal(size=(HQ, 1, NK)), "window": (40, 9)},
}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(x, id=n, marks=[pytest.mark.slow] * (n != "causal"))
        for n, x in COMBINED.items()
    ],
)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (n % 2)) for n, x in enumerate(NAMES)]
)
def test_the_gallery(runner: Runner, name: str, more: dict[str, Any]) -> None:
    options = calls(B, HQ, NQ, NK)[name] | more
    able(runner, options)
    q, k, v, dout = normal(SIZES, np.float64)
    dlse = np.random.default_rng(1).normal(size=(B, HQ, NQ))
    check(runner, AttentionCase(q, k, v, dout, dlse, options))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_gallery_in_less_precision(backend: Runner, name: str) -> None:
    dtype = (np.float16, np.float32)[NAMES.index(name) % 2]
    options = calls(B, HQ, NQ, NK, np.float32)[name]
    able(backend, options)
    q, k, v, dout = normal(SIZES, dtype)
    check(backend, AttentionCase(q, k, v, dout, None, options))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    "dtype",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in (np.float16, np.float64)), np.float32],
)
def test_functions_beyond_the_gallery(runner: Runner, name: str, dtype: Any) -> None:
    options = options_of(name, dtype)
    able(runner, options)
    q, k, v, dout = normal(SIZES, dtype)
    check(runner, AttentionCase(q, k, v, dout, None, options))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [(16, 24), (64, 128), (40, 7)], ids=str)
@pytest.mark.parametrize("Nq", [NQ, 2])
def test_a_mask_function_hides_pairs_of_full_blocks(
    runner: Runner, Nq: int, block_size: tuple[int, int]
) -> None:
    """All that a block mask knows of a full block is that it hides nothing of it itself."""
    rows, keys = (-(-n // size) for n, size in zip((Nq, 131), block_size, strict=True))
    blocks = np.ones((1, HQ, rows, keys), bool)
    blocks[..., -1, 0] = rows < 2
    full = BlockMask(blocks, block_size)
    options = {"block_mask": full, "mask_mod": lambda b, h, i, j: (i + j + h + b) % 3 != 0}
    sizes = B, HQ, HKV, Nq, 131, D, DV
    able(runner, options, sizes)
    q, k, v, dout = normal(sizes, np.float64)
    check(runner, AttentionCase(q, k, v, dout, None, options))
    check(runner, AttentionCase(q, k, v, dout, None, options | {"causal": True}))


@pytest.mark.parametrize("name", FROM_THE_END)
@pytest.mark.parametrize(
    "dtype",
    [np.float32, pytest.param(np.float64, marks=pytest.mark.slow)],
    ids=lambda x: x.__name__,
)
def test_negative_indices_count_from_the_end(runner: Runner, name: str, dtype: Any) -> None:
    options = options_of(name, dtype)
    able(runner, options)
    q, k, v, dout = normal(SIZES, dtype)
    check(runner, AttentionCase(q, k, v, dout, None, options))


@pytest.mark.parametrize("name", FROM_THE_END)
def test_the_oracle_indexes_as_numpy_does(name: str) -> None:
    """The elements read are a bias and a mask, and their gradient is added at the same places."""
    options = options_of(name, np.float64)
    table, seen, steps = options["aux"]
    q, k, v, dout = normal(SIZES, np.float64)
    b, h, i, j = np.ogrid[:1, :HQ, :NQ, :NK]
    read = tuple(np.broadcast_arrays(*FROM_THE_END[name][0](b, h, i, j, steps)))
    expected = reference.backward(dout, q, k, v, bias=table[read], mask=seen[read])
    assert expected.dbias is not None
    by_element = np.zeros(table.shape)
    np.add.at(by_element, read, expected.dbias)
    expected = expected._replace(dbias=None)
    expected.daux = by_element, None, None
    bounds = error_bound(q, k, v, dout, **options)
    assert_attention_close(reference.backward(dout, q, k, v, **options), expected, bounds)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(len(SCORES)), ids=SCORES)
@settings(max_examples=3)
@given(data=st.data())
def test_functions_with_any_other_options(backend: Runner, turn: int, data: Any) -> None:
    """With one dtype and one mask, so that fewer kernels are compiled."""
    able(backend, GALLERY[SCORES[turn]])
    dtypes, mask = [DTYPES[turn % 4]], ("sliding_window", "scattered")[turn // 4 % 2]
    case = data.draw(problems(dtypes=dtypes, max_length=80, edges=False))
    batch, heads, Nq = (1, 1, *case.q.shape)[-4:-1]
    of_score, of_mask = (
        calls(batch, heads, Nq, case.k.shape[-2])[name] for name in (SCORES[turn], mask)
    )

    def mask_mod(b: Any, h: Any, i: Any, j: Any, *_: Any) -> Any:
        return of_mask["mask_mod"](b, h, i, j)

    options = case.options | of_score | {"mask_mod": mask_mod}
    assume(backend.why_not(case.q, case.k, case.v, options) is None)
    check(backend, case._replace(options=options))
