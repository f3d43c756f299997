"""The cache of validated calls: what is remembered, and what must be looked at each time."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tileattn import BlockMask
from tileattn.backends import registry
from tileattn.call.options import OPTIONS, ROWS
from tileattn.call.parse import at_numbers, kind_of_call, parse
from tileattn.call.prepared import (
    kind_signature,
    signature,
)
from tileattn.expressions.functions import read_valid_functions


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


X = array()
HOST: Any = np.zeros((2, 2))


@pytest.mark.parametrize(
    ("arrays", "backend", "options"),
    [
        ((X, X, X), "cupy", {"bias": SimpleNamespace(shape=(5, 7))}),
        ((X, X, X), "cupy", {"kv_lengths": np.zeros(5000, int)}),
        ((X, X, X), "cupy", {"kv_lengths": [0] * 5000}),
        ((X, X, X), "cupy", {"scale": np.zeros(1, "i4, i4")[0]}),  # which has no hash
        ((X, X, X), "cupy", {"kv_lengths": array((), np.int64)}),
        ((X, X, X), "cupy", {"kv_lengths": {1, 2}}),
        ((X, X, X), "cupy", {"window": (object(), 1)}),
        ((X, X, X), "cupy", {"scale": b"0.5"}),
        ((X, X, X), ["cupy"], {}),  # a backend that is no name
        *(((x, x, [1.0]), "auto", {}) for x in (HOST, [[1.0]], None)),
        ((X, X, None), "auto", {}),
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


def test_descales_on_a_device_are_never_read() -> None:
    for shape in ((), (3,), (2, 3), (2, 3, 5)):
        key = of({"k_descale": array(shape)})
        assert key is not None
        assert key == of({"k_descale": array(shape)})
        assert key != of({"k_descale": array((*shape, 1))})


def test_a_block_mask_is_not_kept_alive() -> None:
    mask = BlockMask(np.ones((1, 1), bool), (8, 8))
    key = of({"block_mask": mask})
    assert key == of({"block_mask": mask})
    gone = key[-1]
    del mask
    assert gone() is None


# --- signatures of NumPy arrays ------------------------------------------------------------------


class Named(np.ndarray):
    pass


PLAIN = np.zeros((2, 2, 3, 4), np.float32)
HOSTS: list[Any] = [
    PLAIN,
    PLAIN + 1,
    PLAIN[:, :1],
    PLAIN[0],
    PLAIN[..., ::-1],
    PLAIN.swapaxes(1, 2).copy().swapaxes(1, 2),
    PLAIN.astype(np.float64),
    PLAIN.astype(">f4"),
    PLAIN.view(Named),
    np.ma.array(PLAIN),
    PLAIN.tolist(),
]
INTEGERS: list[Any] = [
    *(np.array(x, dtype) for x in ([3, 1], [3, 4], [3], 2) for dtype in ("i8", "<i2", ">i2", "f4")),
    *(np.array(x).view(Named) for x in ([3, 1], [3, 4])),
    *([3, 1], (3, 1), [3, 4], [3, True], [3, 1.0], 3, 3.0, True, np.int8(3), None, 1 << 60, "3"),
]
FLOATS: list[Any] = [0.5, np.float32(0.5), np.float64(0.5), 1, True, 0.0, -0.0, np.nan, "1", None]
PAIRS = np.ones((3, 3), np.bool_)
TREE = np.ones((1, 3, 3), np.bool_)
OFFSETS: list[Any] = [
    *(np.array(x) for x in ([0, 1, 3], [0, 2, 3], [0, 1, 4], [0, 3], [0.0, 1.0, 3.0])),
    *([0, 1, 3], (0, 1, 3), [0, True, 3], [0, 4, 3], 3, None),
]
DESCALES: list[Any] = [
    *(np.full(x, 0.5, np.float32) for x in (2, 3, (2, 2), (2, 2, 3), (2, 3), ())),
    *(np.full(2, x, np.float32) for x in (-1, np.nan, 0)),
    *(np.ones(2), np.ones((2, 2), np.float32)[:, ::-1], np.float32(0.5), np.array(0.5)),
    *(0.5, 1, 0, 0.0, -1.0, np.nan, 1e39, True, "1", [0.5, 0.5], None),
]


def _add_table(s: Any, _b: Any, _h: Any, _i: Any, j: Any, table: Any) -> Any:
    return s + table[j]


VALUES: dict[str, list[Any]] = {
    **dict.fromkeys("qkv", HOSTS),
    "kv_lengths": INTEGERS,
    "q_offset": INTEGERS,
    "scale": FLOATS,
    "softcap": FLOATS,
    "dropout_p": FLOATS,
    "seed": [1, 1.0, True, np.uint8(1), -1, 1 << 64],
    "causal": [True, 1, np.True_, np.False_, None],
    "invariant": [True, 1, np.True_, np.False_, None],
    "window": [(1, 0), [1, 0], (1, False), (1, None), (1.0, 0), (1, 0, 0), -1],
    "bias": [*HOSTS[:2], PLAIN[..., :3], PAIRS * 1.0, PAIRS * 2.0, np.float32(1), np.array(1.0)],
    "mask": [PAIRS, ~PAIRS, PAIRS.T, PAIRS[:, ::-1], PAIRS[:1], PAIRS * 1, np.array(True)],
    "alibi_slopes": [np.ones(2), np.zeros(2), np.ones(2, ">f8"), np.ones((2, 2)), np.ones(3)],
    "sinks": [np.ones(2), np.zeros(2), np.ones(2, np.float16), np.ones(4)[::2], np.ones((1, 2))],
    "block_mask": [MASK, BlockMask(np.ones((1, 1), bool), (8, 8)), MASK.kinds, None],
    "tree_mask": [TREE, ~TREE, PAIRS, TREE[..., ::-1], TREE.swapaxes(1, 2), TREE * 1, None],
    "prefix": INTEGERS,
    "cu_seqlens_q": OFFSETS,
    "cu_seqlens_k": OFFSETS,
    "block_table": [np.array(x) for x in ([[0], [1]], [[1], [0]], [[0], [9]], [0, 1], [[0.0]])],
    **dict.fromkeys(("k_descale", "v_descale"), DESCALES),
    "origin": [(1, 2, 3, 4), [1, 2, 3, 4], (1, 2, 3, 5), (1, 2, 3, True), (1, 2, 3), INTEGERS[0]],
    "score_mod": [_add_table, lambda s, *_: s * 2, lambda s, *_: s * 3, 1],
    "mask_mod": [lambda _b, _h, i, j, _t: i > j, lambda _b, _h, i, j, _t: i >= j, 1],
    "aux": [(np.ones(3),), (np.zeros(3),), [np.ones(3)], (np.ones(4),), (np.ones(3, "f4"),), ()],
    "unknown": [1],
}
OFFSETS_BESIDE: dict[str, Any] = {"cu_seqlens_q": [0, 1, 3], "cu_seqlens_k": [0, 1, 3]}
FUNCTION_BESIDE: dict[str, Any] = {"score_mod": _add_table, "aux": (PAIRS[0],)}
BYTES = PLAIN.astype(np.int8)
QUANTISED: dict[str, Any] = {"k": BYTES, "v": BYTES, "k_descale": 0.5, "v_descale": 0.5}
BESIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("k_descale", "v_descale"), QUANTISED),
    **dict.fromkeys(OFFSETS_BESIDE, dict.fromkeys("qkv", PLAIN[:1]) | OFFSETS_BESIDE),
    "block_table": {"kv_lengths": [3, 3]},
    "origin": {"dropout_p": 0.5, "seed": 1},
    "score_mod": FUNCTION_BESIDE,
    "mask_mod": FUNCTION_BESIDE,
    "aux": FUNCTION_BESIDE,
}
"""What an option needs beside it to be valid."""


def validated(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Find what validation makes of a call: facts, lengths and layouts; None if it is refused."""
    try:
        registry.candidates("numpy", {"q": q, "k": k, "v": v, "bias": options.get("bias")})
        problem, x = parse(q, k, v, options)
    except (TypeError, ValueError):
        return None
    layouts = [(a.shape, a.strides, a.dtype) for a in (x.q, x.k, x.v)]
    return str(problem), x.kv_lengths.tolist(), x.q_offset.tolist(), layouts


def test_every_option_has_values() -> None:
    assert VALUES.keys() == {*ROWS, *OPTIONS, "unknown"}


@pytest.mark.parametrize("name", BESIDE)
def test_the_first_value_is_valid(name: str) -> None:
    call = {**dict.fromkeys("qkv", PLAIN), **BESIDE[name], name: VALUES[name][0]}
    assert validated(**call) is not None


@pytest.mark.parametrize("name", VALUES)
def test_calls_of_equal_signatures_are_all_valid_and_the_same_or_all_refused(name: str) -> None:
    """Any two values of one argument."""
    found: dict[Any, Any] = {}
    for value in VALUES[name]:
        call = {**dict.fromkeys("qkv", PLAIN), **BESIDE.get(name, {}), name: value}
        result = validated(**call)
        arrays = [call.pop(n) for n in "qkv"]
        key = signature(arrays, "numpy", call)
        assert key is None or found.setdefault(key, result) == result


@pytest.mark.parametrize("name", ["bias", "mask", "tree_mask", "alibi_slopes", "sinks"])
def test_values_that_validation_does_not_look_at_are_no_part_of_the_signature(name: str) -> None:
    one, other = VALUES[name][:2]
    arrays = PLAIN, PLAIN, PLAIN
    assert signature(arrays, "numpy", {name: one}) == signature(arrays, "numpy", {name: other})
    assert signature((PLAIN + 1, *arrays[1:]), "numpy", {}) == signature(arrays, "numpy", {})


def outcome(make: Any) -> Any:
    try:
        problem, x = make()
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    places = x.kv_lengths.tolist(), x.q_offset.tolist(), str(x.packing), str(x.paging)
    return str(problem), places, x.q.shape, x.k.shape, x.v.shape, len(x.aux)


@pytest.mark.parametrize("name", VALUES)
def test_calls_of_one_kind_need_only_their_numbers_checked(name: str) -> None:
    """Any two values of one argument, the kind validated with the first."""
    kinds: dict[Any, Any] = {}
    shared = 0
    for value in VALUES[name]:
        call = {**dict.fromkeys("qkv", PLAIN), **BESIDE.get(name, {}), name: value}
        q, k, v = arrays = [call.pop(n) for n in "qkv"]
        call = read_valid_functions(call)
        key = kind_signature(arrays, "numpy", call)
        if key in kinds:
            shared += 1
            numbers_only = partial(at_numbers, kinds[key], q, k, v, call)
            assert outcome(numbers_only) == outcome(partial(parse, q, k, v, call))
        elif key is not None:
            try:
                kinds[key] = kind_of_call(q, k, v, call)
            except (TypeError, ValueError):
                continue
    numbers = {"scale", "softcap", "dropout_p", "seed", "kv_lengths", "q_offset", *"qkv"}
    assert shared or name not in numbers
