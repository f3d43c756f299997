"""Functions with captured numbers that change from call to call, on every backend."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tests.arrays import normal
from tests.conftest import Runner
from tests.contract.test_backends import check
from tests.contract.test_functions import able
from tileattn import BlockMask
from tileattn.expressions.functions import mask_expression, score_expression
from tileattn.testing import AttentionCase

SIZES = 2, 4, 2, 67, 93, 12, 20
SHAPE = 2, 4, 67, 93


def score(temperature: float, offset: int, far: float) -> Any:
    def function(s: Any, _b: Any, h: Any, i: Any, j: Any) -> Any:
        near = abs(i - j + offset) < 30
        return np.where(near, s / temperature, far * s) + h // max(1, offset)

    return function


def mask(width: int, start: int) -> Any:
    return lambda _b, _h, i, j: (i - j < width) & (i - j >= start) | (j % (abs(start) + 1) == 0)


SCORES: list[Any] = [(1.5, 3, 0.5), (0.7, 9, -0.25), (np.float32(1.0), 2**31, -0.0)]
MASKS = [(5, -9), (0, 0), (90, -(2**40))]


def both_passes(runner: Runner, arrays: Any, options: dict[str, Any]) -> Any:
    q, k, v, dout = arrays
    attention = runner.forward(q, k, v, **options)
    grads = runner.backward(dout, q, k, v, *attention, **options)
    return (*attention, grads.dq, grads.dk, grads.dv)


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float16, marks=pytest.mark.slow)])
def test_results_are_those_of_constants(runner: Runner, dtype: Any) -> None:
    """Both passes have the same bits as with the numbers compiled in."""
    arrays = normal(SIZES, dtype)
    # float16 is computed in float32: one set shows that its rows are read the same way.
    for given, limits in [*zip(SCORES, MASKS, strict=True)][-1 if dtype == np.float16 else 0 :]:
        options = {"score_mod": score(*given), "mask_mod": mask(*limits)}
        able(runner, options, SIZES)
        literal = {
            "score_mod": score_expression(options["score_mod"], ()),
            "mask_mod": mask_expression(options["mask_mod"], ()),
        }
        found, expected = (both_passes(runner, arrays, x) for x in (options, literal))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_block_masks_with_numbers(runner: Runner) -> None:
    q, k, v, dout = normal(SIZES, np.float32)
    for limits in MASKS:
        options = {"block_mask": BlockMask.from_predicate(mask(*limits), SHAPE, (16, 32))}
        able(runner, options, SIZES)
        check(runner, AttentionCase(q, k, v, dout, None, options))


def test_llvm_compiles_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite", reason="it compiles the kernels: pip install llvmlite")
    from tileattn.kernels.llvm import compile as llvm

    q, k, v, dout = normal(SIZES, np.float32)

    def run(n: int) -> None:
        options: dict[str, Any] = {
            "score_mod": lambda s, *_: s / (1.5 + n),
            "mask_mod": lambda _b, _h, i, j: (i - j < 30 + n) | (j % (2 + n) == 0),
        }
        attention = tileattn.forward(q, k, v, backend="llvm", **options)
        tileattn.backward(dout, q, k, v, *attention, backend="llvm", **options)

    run(1)
    run(2)  # the second divisor is a parameter
    monkeypatch.setattr(llvm, "functions", None)
    monkeypatch.setattr(llvm, "object_code", None)
    for n in range(3, 30):
        run(n)
