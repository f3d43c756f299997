"""`assert_attention_close` takes plain arrays, tuples and tensors, and results of the library."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.arrays import normal
from tests.testing.test_testing import DTYPES, oracle, plain
from tileattn import Attention, reference
from tileattn.testing import assert_attention_close, error_bound

FORMS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "list": list,
    "mapping": lambda x: x._asdict(),
    "first": lambda x: x[0] if isinstance(x, Attention) else tuple(x[:3]),
}


@pytest.mark.parametrize("form", FORMS)
def test_results_may_be_plain(form: str) -> None:
    made = FORMS[form]
    *wanted, bounds = oracle(np.float32)
    results: list[Any] = [*plain(np.float32)]
    for result, expected in zip(results, wanted, strict=True):
        assert_attention_close(made(result), expected, bounds)
        assert_attention_close(result, made(expected), bounds)
        assert_attention_close(made(result), made(expected), bounds)
        first = result._fields[0]
        wrong = result._replace(**{first: result[0] * np.float32(1.01)})
        with pytest.raises(AssertionError, match=f"^{first} has error"):
            assert_attention_close(made(wrong), expected, bounds)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_taken_everywhere(dtype: Any) -> None:
    torch = pytest.importorskip("torch")

    def tensor(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        narrow = x.dtype == ml_dtypes.bfloat16
        made = torch.from_numpy((x.view(np.int16) if narrow else x).copy())
        return made.view(torch.bfloat16).requires_grad_() if narrow else made

    q, k, v, dout = normal((2, 4, 2, 7, 9, 8, 6), dtype)
    bias = np.random.default_rng(1).normal(size=(7, 9)).astype(np.float32)
    tensors = [*map(tensor, (q, k, v))]
    bounds = error_bound(q, k, v, dout, bias=bias)
    rows: list[Any] = [*tensors, tensor(dout)]
    assert error_bound(*rows, bias=tensor(bias)) == bounds
    expected = reference.forward(*tensors, bias=tensor(bias))
    np.testing.assert_array_equal(expected.out, reference.forward(q, k, v, bias=bias).out)
    out, lse = tileattn.forward(q, k, v, bias=bias)
    assert_attention_close((tensor(out), tensor(lse)), expected, bounds)
    grads = tileattn.backward(dout, q, k, v, out, lse, bias=bias)
    theirs = reference.backward(tensor(dout), *tensors, bias=tensor(bias))
    assert_attention_close([*map(tensor, grads)], theirs, bounds)
    with pytest.raises(AssertionError, match=r"^out is torch\.Tensor, expected numpy\.ndarray"):
        assert_attention_close(tensor(out), expected, bounds, array_type=np.ndarray)
