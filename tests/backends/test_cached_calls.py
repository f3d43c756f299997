"""A call like an earlier one: the same bits and errors, whatever came before it."""

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tests.arrays import normal
from tileattn.backends import known_calls, registry
from tileattn.call.prepared import CALLS, PreparedCall

Array = NDArray[Any]

SIZES = (2, 4, 2, 5, 7, 8, 6)  # B, Hq, Hkv, Nq, Nk, D, Dv
B, HQ, _, NQ, NK, D, DV = SIZES
Call = Callable[..., Any]


@pytest.fixture(params=["numpy", "llvm"])
def both(request: pytest.FixtureRequest) -> Call:
    """Both passes of a backend for NumPy arrays; what they return."""
    reason = registry.get(request.param).unavailable()
    if reason is not None:
        pytest.skip(f"{request.param}: {reason}")

    def call(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> list[Array]:
        result = tileattn.forward(q, k, v, backend=request.param, **options)
        options.pop("out", None)
        grads = tileattn.backward(dout, q, k, v, *result, backend=request.param, **options)
        return [x for x in (*result, *grads) if x is not None]

    return call


def outcome(call: Call, *arrays: Any, **options: Any) -> Any:
    """Return the result of a call, or the error that it raises."""
    try:
        return [x.tobytes() for x in call(*arrays, **options)]
    except (TypeError, ValueError) as error:
        return type(error), str(error)


def uncached(call: Call, *arrays: Any, **options: Any) -> Any:
    CALLS.clear()
    return outcome(call, *arrays, **options)


class Named(np.ndarray):
    pass


def unaligned(x: Array) -> Array:
    memory = np.empty(x.nbytes + 1, np.uint8)
    found = memory[1:].view(x.dtype).reshape(x.shape)
    found[...] = x
    return found


def read_only(x: Array) -> Array:
    x = x.copy()
    x.flags.writeable = False
    return x


LAYOUTS: dict[str, Callable[[Array], Any]] = {
    "plain": np.copy,
    "heads after rows": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
    "columns first": lambda x: x.swapaxes(2, 3).copy().swapaxes(2, 3),
    "every other column": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "backwards": lambda x: x[:, :, ::-1].copy()[:, :, ::-1],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "unaligned": unaligned,
    "read-only": read_only,
    "of a subclass": lambda x: x.view(Named),
    "in swapped bytes": lambda x: x.astype(x.dtype.newbyteorder()),
    "masked": lambda x: np.ma.array(x, mask=False),
    "a list": lambda x: x.tolist(),
    "of no rows": lambda x: x[:, :, :0],
    "of no heads": lambda x: x[:, :0],
    "of two axes": lambda x: x[0, 0],
    "float64": lambda x: x.astype(np.float64),
    "float16": lambda x: x.astype(np.float16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_any_layout_after_plain_ones(both: Call, layout: str) -> None:
    """Each array on its own and all together: in the second call, and in the third, as alone."""
    given = normal(SIZES)
    other = LAYOUTS[layout]
    changed = [
        *([other(x) if m == n else x for m, x in enumerate(given)] for n in range(len(given))),
        [other(x) for x in given],
    ]
    for arrays in changed:
        expected = uncached(both, *arrays)
        CALLS.clear()
        both(*given)
        plain = outcome(both, *given)
        assert outcome(both, *arrays) == expected
        assert outcome(both, *arrays) == expected
        assert outcome(both, *given) == plain


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": np.ones((HQ, NQ, NK), np.float32)},
        {"mask": np.ones((NQ, NK), np.bool_)},
        {"alibi_slopes": np.ones(HQ, np.float32)},
        {"sinks": np.ones(HQ)},
        {"kv_lengths": np.full(B, NK)},
        {"q_offset": np.full(B, NK, np.int16), "causal": True},
        {"kv_lengths": np.full(B, NK, ">i4").view(Named)},
    ],
    ids=lambda options: ", ".join(options) or "none",
)
def test_values_that_change_in_place(both: Call, options: dict[str, Any]) -> None:
    given, options = normal(SIZES), {name: copy(x) for name, x in options.items()}
    arrays = [*given, *(x for x in options.values() if isinstance(x, np.ndarray))]
    first = [x.copy() for x in arrays]

    def found(n: int, call: Callable[..., Any]) -> Any:
        """Call with the n-th array at half of its value, and the others at their own."""
        for m, (x, value) in enumerate(zip(arrays, first, strict=True)):
            x[...] = value // 2 if m == n else value
        return call(both, *given, **options)

    expected = [found(n, uncached) for n in range(-1, len(arrays))]
    assert len(set(map(str, expected))) == len(expected)
    CALLS.clear()
    for n in (*range(-1, len(arrays)), *range(-1, len(arrays))):
        assert found(n, outcome) == expected[n + 1]


def test_a_warm_call_outlives_ten_thousand_others(both: Call) -> None:
    given = normal(SIZES)
    both(*given)
    warm = {key: x for key, x in CALLS.items() if isinstance(x, PreparedCall)}
    for n in range(10_000):
        CALLS.keep(n, object())
        if n % 200 == 0:
            both(*given)
    assert warm
    assert all(CALLS.get(key) is x for key, x in warm.items())


STEPS: dict[str, dict[str, list[Any]]] = {
    "lists": {"kv_lengths": [[7, 1024], [2500, 30], [1025, 0], [7, 9]]},
    "arrays": {"kv_lengths": [np.array(x) for x in ([9, 3], [7, 1024], [1025, 0], [9, 2049])]},
    "offsets": {"q_offset": [[2, 2490], (7, 20), [-3, 5], [2400, 9]], "causal": [True]},
    "windows": {"kv_lengths": [[9, 30], [9, 2049], [1025, 0]], "window": [(1023, 2), (9, None)]},
    "trees": {"kv_lengths": [[3, 30], [3, 1025]], "tree_mask": [np.ones((1, 2, 2), bool)]},
}


@pytest.mark.parametrize("values", STEPS.values(), ids=STEPS.keys())
def test_one_step_after_another(both: Call, values: dict[str, list[Any]]) -> None:
    """Lengths that differ by more than the keys of a split, and back again."""
    given = normal((B, HQ, 2, 2, 2500, D, DV))
    calls = [dict(zip(values, step, strict=True)) for step in product(*values.values())]
    expected = [uncached(both, *given, **options) for options in calls]
    CALLS.clear()
    for options, result in [*zip(calls, expected, strict=True)] * 2:
        assert outcome(both, *given, **options) == result


def test_one_page_after_another(cpu_backend: str) -> None:
    q, k, v, _ = normal((B, HQ, 2, 1, 8 * 4, D, DV))
    k, v = (x.reshape(B * 2, 8, 4, -1).swapaxes(0, 1).copy() for x in (k, v))  # 8 pages
    steps: list[dict[str, Any]] = [
        {"kv_lengths": [5, 1], "block_table": [[3, 1], [2, 9]]},
        {"kv_lengths": [8, 4], "block_table": [[0, 1], [2, 2]]},
        {"kv_lengths": [8, 5], "block_table": [[0, 1], [2, 9]]},
        {"kv_lengths": [9, 4], "block_table": [[0, 1], [2, 2]]},
        {"kv_lengths": [5, 1], "block_table": [[3, 1], [2, 9]]},
    ]
    steps = [{name: np.array(x) for name, x in options.items()} for options in steps]
    found = partial(tileattn.forward, backend=cpu_backend)
    expected = [uncached(found, q, k, v, **options) for options in steps]
    assert [x[1] for x in expected if x[0] is ValueError] == [
        "block_table must hold pages from 0 to 7; got 9 for page 1 of sequence 1",
        "kv_lengths must be from 0 to Nk = 8; got 9",
    ]
    CALLS.clear()
    for options, result in [*zip(steps, expected, strict=True)] * 2:
        assert outcome(found, q, k, v, **options) == result


def test_a_step_validates_its_lengths_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = registry.get("llvm").unavailable()
    if reason is not None:
        pytest.skip(f"llvm: {reason}")
    q, k, v, _ = normal(SIZES)
    tileattn.forward(q, k, v, kv_lengths=[3, 4])
    monkeypatch.setattr(known_calls, "kind_of_call", None)
    assert tileattn.forward(q, k, v, kv_lengths=[7, 1]).out.shape == (B, HQ, NQ, DV)
    with pytest.raises(ValueError, match=r"^kv_lengths must be .*; got 8$"):
        tileattn.forward(q, k, v, kv_lengths=[8, 1])


def test_lengths_that_become_wrong_are_refused(both: Call) -> None:
    given, lengths = normal(SIZES), np.array([NK, 3])
    both(*given, kv_lengths=lengths)
    lengths[1] = NK + 1
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^kv_lengths must be .*; got {NK + 1}$"):
            both(*given, kv_lengths=lengths)


def test_scales_that_compare_equal_have_the_same_bits(both: Call) -> None:
    given = normal(SIZES)
    assert uncached(both, *given, scale=-0.0) == uncached(both, *given, scale=0.0)


@pytest.mark.parametrize("axes", [2, 3])
def test_fewer_axes(both: Call, axes: int) -> None:
    given = [x[(0,) * (4 - axes)] for x in normal(SIZES)]
    given[1:3] = (np.repeat(x, 2, axis=0) if axes == 3 else x for x in given[1:3])
    expected = both(*given)
    for found in (both(*given), both(*given)):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_numbers_decide_how_bfloat16_is_multiplied_in_every_call(both: Call) -> None:
    """Numbers so large that only their sums in float32 are right, and others."""
    usual = normal((2, 4, 2, 17, 9, 8, 6), ml_dtypes.bfloat16)
    large = [x * x.dtype.type(2.0**70) for x in usual[:1]] + [*usual[1:]]
    expected = [uncached(both, *given) for given in (usual, large)]
    CALLS.clear()
    for n in (0, 1, 0, 1, 1, 0):
        assert outcome(both, *(usual, large)[n]) == expected[n]


def test_callers_beside_each_other(both: Call) -> None:
    problems = [normal(SIZES, seed=seed) for seed in range(8)]
    expected = [outcome(both, *given) for given in problems]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: outcome(both, *problems[n % 8]), range(800)))
    assert all(x == expected[n % 8] for n, x in enumerate(found))


def test_no_array_of_the_caller_is_kept(both: Call) -> None:
    given = normal(SIZES)
    results = [both(*given) for _ in range(3)]
    held = [weakref.ref(x) for x in (*given, *(x for result in results for x in result))]
    del given, results
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []


# --- out= ----------------------------------------------------------------------------------------


def test_out_is_looked_at_in_every_call(both: Call) -> None:
    q, k, v, dout = normal((B, HQ, HQ, NQ, NQ, D, D))
    memory = np.zeros((3, *q.shape), np.float32)
    out, inside, beside = memory[0], memory[1], memory[2]
    inside[...] = q
    expected = both(inside, k, v, dout)
    options: dict[str, Any]
    for _ in range(2):
        for options in ({}, {"kv_lengths": np.full(B, NQ)}, {"causal": False}):
            for place in (out, beside):
                found = both(inside, k, v, dout, out=place, **options)
                assert found[0] is place
                for ours, theirs in zip(found, expected, strict=True):
                    np.testing.assert_array_equal(ours, theirs)
            for name, arrays in (("q", (inside, k, v)), ("v", (q, k, inside))):
                with pytest.raises(ValueError, match=f"^out must not overlap {name}"):
                    both(*arrays, dout, out=inside, **options)
            out.flags.writeable = False
            with pytest.raises(ValueError, match=r"^out must be writable; "):
                both(inside, k, v, dout, out=out, **options)
            out.flags.writeable = True


@pytest.mark.parametrize("name", ["kv_lengths", "q_offset"])
def test_out_shares_no_memory_with_lengths(both: Call, name: str) -> None:
    given = normal(SIZES)
    memory = np.zeros(B * HQ * NQ * DV + 2 * B, np.float32)
    out = memory[: -2 * B].reshape(B, HQ, NQ, DV)
    both(*given, out=out, **{name: memory[-2 * B :].view(np.int64)})
    for _ in range(2):
        memory[...] = 0
        with pytest.raises(ValueError, match=f"^out must not overlap {name}"):
            both(*given, out=out, **{name: memory[: 2 * B].view(np.int64)})


def test_out_may_lie_between_the_rows_of_an_input(both: Call) -> None:
    q, k, v, dout = normal((B, HQ, HQ, NQ, NQ, D, D))
    whole = np.zeros((B, HQ, NQ, 2 * D), np.float32)
    inside, out = whole[..., :D], whole[..., D:]
    inside[...] = q
    expected = both(q, k, v, dout)[0]
    for _ in range(3):
        np.testing.assert_array_equal(both(inside, k, v, dout, out=out)[0], expected)
        np.testing.assert_array_equal(inside, q)
