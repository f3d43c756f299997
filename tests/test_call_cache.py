"""The cache of validated calls: what is remembered, and what must be looked at each time."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tileattn import BlockMask
from tileattn.call_cache import MOST, CallCache, PreparedCall, signature


def array(shape: tuple[int, ...] = (2, 3, 5, 8), dtype: Any = np.float32, step: int = 1) -> Any:
    """Describe an array that is not on the host."""
    strides = tuple(step * n for n in np.zeros(shape, dtype).strides)
    return SimpleNamespace(shape=shape, dtype=np.dtype(dtype), strides=strides)


MASK = BlockMask(np.ones((1, 1), bool), (8, 8))
BASE: dict[str, Any] = {"causal": True, "scale": 0.5, "bias": array((5, 7)), "block_mask": MASK}


def of(options: dict[str, Any], x: Any = None, backend: Any = "cupy") -> Any:
    x = array() if x is None else x
    return signature((x, x, x), backend, options)


def test_equal_calls_have_equal_signatures() -> None:
    assert of(BASE) is not None
    assert of(BASE) == of({**BASE, "bias": array((5, 7))})
    assert hash(of(BASE)) == hash(of(dict(BASE)))


@pytest.mark.parametrize(
    "changed",
    [
        {"causal": 1},
        {"causal": False},
        {"scale": 1},
        {"scale": np.float32(0.5)},
        {"scale": None},
        {"window": (3, None)},
        {"window": [3, None]},
        {"window": (3, False)},
        {"bias": array((5, 7), np.float64)},
        {"bias": array((1, 7))},
        {"bias": array((5, 7), step=2)},
        {"block_mask": BlockMask(np.ones((1, 1), bool), (8, 8))},
        {"kv_lengths": [1, 2]},
        {"kv_lengths": np.array([1, 2])},
        {"unknown": True},
    ],
    ids=str,
)
def test_whatever_validation_looks_at_changes_the_signature(changed: dict[str, Any]) -> None:
    assert of({**BASE, **changed}) != of(BASE)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((3, 0), (3, False)),
        ((True, 1), (1, 1)),
        ([1, 2], [1, 3]),
        ([1, 2], (1, 2)),
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([1, 2]), np.array([1, 2], np.int32)),
        (np.array([[1, 2]]), np.array([1, 2])),
        (1, True),
        (0.0, 0),
    ],
    ids=str,
)
def test_values_that_compare_equal_or_are_short_are_told_apart(one: Any, other: Any) -> None:
    assert of({"kv_lengths": one}) != of({"kv_lengths": other})


@pytest.mark.parametrize("x", [array((2, 3, 5, 9)), array(dtype=np.float16), array(step=2)])
def test_each_property_of_an_array_changes_the_signature(x: Any) -> None:
    assert of({}, x) != of({})


def test_a_missing_array_is_not_a_missing_argument() -> None:
    x = array()
    assert signature((x, x, x, None), "cupy", {}) != signature((x, x, x), "cupy", {})


X = array()
HOST: Any = np.zeros((2, 2))


@pytest.mark.parametrize(
    ("arrays", "backend", "options"),
    [
        ((X, X, X), "cupy", {"bias": HOST}),
        ((X, X, X), "cupy", {"kv_lengths": array((), np.int64)}),
        ((X, X, X), "cupy", {"kv_lengths": {1, 2}}),
        ((X, X, X), "cupy", {"window": (object(), 1)}),
        ((X, X, X), "cupy", {"scale": b"0.5"}),
        ((X, X, X), ["cupy"], {}),  # a backend that is no name
        *(((x, x, [1.0]), "auto", {}) for x in (HOST, [[1.0]], None)),
    ],
)
def test_what_must_be_looked_at_has_no_signature(
    arrays: tuple[Any, ...], backend: Any, options: dict[str, Any]
) -> None:
    assert signature(arrays, backend, options) is None


def test_the_default_backend_is_part_of_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEATTN_BACKEND", raising=False)
    unset = of({}, backend="auto")
    monkeypatch.setenv("TILEATTN_BACKEND", "numpy")
    assert of({}, backend="auto") != unset
    assert of({}, backend="cupy") == of({}, backend="cupy")


def test_a_block_mask_is_not_kept_alive() -> None:
    mask = BlockMask(np.ones((1, 1), bool), (8, 8))
    key = of({"block_mask": mask})
    assert key == of({"block_mask": mask})
    gone = key[-1]
    del mask
    assert gone() is None


def test_the_cache_is_bounded() -> None:
    calls = CallCache()
    made = [PreparedCall(n, None) for n in range(MOST + 3)]  # type: ignore[arg-type]  # nobody looks at the problem
    for n, call in enumerate(made):
        calls.keep(n, call)
        assert calls[n] is call
        assert len(calls) <= MOST
    assert list(calls) == [MOST, MOST + 1, MOST + 2]
