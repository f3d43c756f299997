"""Packed sequences on the GPU: each has the results that it has alone, whatever the others are."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tileattn
from tests.on_gpu import bits, captured, check, needs_gpu, sent, sent_options

pytestmark = [*needs_gpu, pytest.mark.usefixtures("one_blas_thread")]

HQ, HKV = 4, 2
QUERIES, KEYS = [130, 0, 1, 517, 64, 0, 300], [200, 5, 1, 517, 0, 0, 411]
MANY = [1, 3, 0, 2, 300, *[5] * 30]
SLOPES = np.random.default_rng(1).random((len(KEYS), HQ))
TABLE = np.random.default_rng(2).normal(size=(HQ, 40))

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (100, 30), "softcap": 3.0, "sinks": np.linspace(-1, 1, HQ)},
    "lengths": {"kv_lengths": np.array([90, 5, 0, 517, 0, 0, 129]), "causal": True},
    "offsets": {"q_offset": [3, 0, 5, -100, 1, 2, 700], "causal": True, "alibi_slopes": SLOPES},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "functions": {
        "score_mod": lambda s, b, h, i, j, t: s + t[h, (i - j + b) % 40],
        "mask_mod": lambda b, h, i, j, t: abs(i - j) + t[h, 0] < 90 + 50 * b,
        "aux": (TABLE,),
    },
}

Arrays = list[Any]


def arrays(queries: Sequence[int], keys: Sequence[int], dtype: Any, D: int, Dv: int) -> Arrays:
    """Draw q, k, v and dout, the tokens outermost in memory."""
    rng = np.random.default_rng(0)
    sizes = (sum(queries), HQ, D), (sum(keys), HKV, D), (sum(keys), HKV, Dv), (sum(queries), HQ, Dv)
    made = (sent(rng.standard_normal(size, np.float32).astype(dtype)) for size in sizes)
    return [x.swapaxes(0, 1) for x in made]


def offsets(queries: Sequence[int], keys: Sequence[int]) -> dict[str, Any]:
    """Return where sequences start."""
    ends = (np.cumsum([0, *lengths]) for lengths in (queries, keys))
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))


def there(queries: Sequence[int], keys: Sequence[int]) -> dict[str, Any]:
    """Return the same on the device."""
    return {name: sent(x) for name, x in offsets(queries, keys).items()}


def spans(lengths: Sequence[int]) -> Iterator[slice]:
    for start, stop in pairwise(np.cumsum([0, *lengths]).tolist()):
        yield slice(start, stop)


def both(given: Arrays, options: dict[str, Any]) -> tuple[Any, ...]:
    """Compute out, lse, dq, dk and dv."""
    q, k, v, dout = given
    attention = tileattn.forward(q, k, v, **options)
    grads = tileattn.backward(dout, q, k, v, *attention, deterministic=True, **options)
    return *attention, *grads[:3]


def parts(results: Sequence[Any], rows: slice, keys: slice) -> list[Any]:
    """Cut out what belongs to a sequence."""
    return [x[:, span] for x, span in zip(results, (rows, rows, rows, keys, keys), strict=True)]


KINDS: list[tuple[Any, int, int]] = [
    (np.float32, 64, 64),
    (np.float16, 64, 64),
    (np.float64, 20, 33),
    (ml_dtypes.bfloat16, 128, 128),
    (ml_dtypes.bfloat16, 20, 36),
    (np.float16, 192, 128),
    (np.float32, 300, 20),
]


@pytest.mark.parametrize("shift", range(1, len(KINDS), 2))
@pytest.mark.parametrize("name", OPTIONS)
def test_results(name: str, shift: int) -> None:
    """Each kind runs some of the options: naive kernels compute no gradients of aux."""
    number = list(OPTIONS).index(name) + shift
    dtype, D, Dv = KINDS[number % len(KINDS)]
    given = arrays(QUERIES, KEYS, dtype, D, Dv)
    options = sent_options(OPTIONS[name] | offsets(QUERIES, KEYS), integers=number % 2 == 0)
    check(given, options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "D"), [(ml_dtypes.bfloat16, 512), (np.float16, 384)])
def test_head_dimensions_above_256(dtype: Any, D: int, causal: bool) -> None:
    queries, keys = [5, 130, 0, 64, 1], [70, 130, 9, 257, 33]
    options = sent_options({"causal": causal} | offsets(queries, keys), integers=True)
    check(arrays(queries, keys, dtype, D, D), options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "D"),
    [
        (np.float32, 264),  # up to 256 columns the lengths of a call of its own choose the kernel
        (np.float64, 128),
        (np.float16, 20),
        (ml_dtypes.bfloat16, 36),
        (np.float16, 320),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_sequence_has_the_bits_that_it_has_alone(dtype: Any, D: int, causal: bool) -> None:
    """In a call of its own, not packed."""
    given = arrays(QUERIES, KEYS, dtype, D, D)
    given[1][0, 150], given[2][1, 210] = np.inf, np.nan
    given[0][:, 131:300] *= 30
    packed = both(given, {"causal": causal} | there(QUERIES, KEYS))
    for rows, keys in zip(spans(QUERIES), spans(KEYS), strict=True):
        own = [x[:, span] for x, span in zip(given, (rows, keys, keys, rows), strict=True)]
        assert bits(parts(packed, rows, keys)) == bits(both(own, {"causal": causal}))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "D"),
    [(np.float16, 64), (ml_dtypes.bfloat16, 128), (np.float16, 256), (np.float32, 64)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_what_others_hold_does_not_matter(dtype: Any, D: int, causal: bool) -> None:
    """Not their values, NaN among them, nor their lengths."""
    given = arrays(QUERIES, KEYS, dtype, D, D)
    options: dict[str, Any] = {"causal": causal}
    packed = both(given, options | there(QUERIES, KEYS))
    for bad in (0, 3, 6):
        spoiled = [x.copy() for x in given]
        for x, lengths in zip(spoiled, (QUERIES, KEYS, KEYS, QUERIES), strict=True):
            x[:, list(spans(lengths))[bad]] = np.nan
        found = both(spoiled, options | there(QUERIES, KEYS))
        for n, (rows, keys) in enumerate(zip(spans(QUERIES), spans(KEYS), strict=True)):
            if n != bad:
                assert bits(parts(found, rows, keys)) == bits(parts(packed, rows, keys)), (bad, n)
    for n, (rows, keys) in enumerate(zip(spans(QUERIES), spans(KEYS), strict=True)):
        own = [x[:, span] for x, span in zip(given, (rows, keys, keys, rows), strict=True)]
        alone = both(own, options | there(QUERIES[n : n + 1], KEYS[n : n + 1]))
        assert bits(alone) == bits(parts(packed, rows, keys)), n


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda x: x.__name__)
def test_offsets_that_change_on_the_device(dtype: Any) -> None:
    """Calls of one signature read them again, from other arrays or from the same."""
    total = sum(MANY)
    given = arrays([total], [total], dtype, 64, 64)
    shared = sent(np.zeros(len(MANY) + 1, np.int64))
    for lengths in (MANY, MANY[::-1], [total, *[0] * (len(MANY) - 1)]):
        ends = np.cumsum([0, *lengths])
        shared.set(ends)
        expected = both(given, {"causal": True, "cu_seqlens_q": ends})
        for ends_there in (shared, sent(ends.astype(np.int32))):
            assert bits(both(given, {"causal": True, "cu_seqlens_q": ends_there})) == bits(expected)


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda x: x.__name__)
@pytest.mark.parametrize(
    "kinds", [("i4", "i4"), ("i4", "i8"), ("i8", "i4"), ("i2", "u4"), ("i8", "i8")], ids=str
)
def test_integers_of_any_size(kinds: tuple[str, str], dtype: Any) -> None:
    """Each array has its own; calls of one signature read them again."""
    given = arrays(QUERIES, KEYS, dtype, 64, 64)
    for turn in (1, -1, 1):
        queries, keys = QUERIES[::turn], KEYS[::turn]
        ends = offsets(queries, keys)
        ends |= {"kv_lengths": np.array(keys) // 2, "q_offset": np.arange(len(keys)) * 9 - 20}
        expected = both(given, {"causal": True, **ends})
        kind_of = dict(zip(ends, kinds * 2, strict=True))
        kind_of["q_offset"] = kinds[0]  # which is signed
        sent_ends = {name: sent(x.astype(kind_of[name])) for name, x in ends.items()}
        assert bits(both(given, {"causal": True, **sent_ends})) == bits(expected)


@pytest.mark.parametrize("kind", [np.int32, np.int64], ids=lambda x: x.__name__)
def test_a_graph_replays_other_offsets(kind: Any) -> None:
    """A repeated call looks at nothing but addresses."""
    total = sum(MANY)
    q, k, v, _ = arrays([total], [total], np.float16, 64, 64)
    ends = sent(np.cumsum([0, *MANY]).astype(kind))
    call = partial(tileattn.forward, q, k, v, causal=True, cu_seqlens_q=ends)
    with captured(call) as (results, replay):
        for lengths in (MANY[::-1], [total, *[0] * (len(MANY) - 1)]):
            given = np.cumsum([0, *lengths])
            ends.set(given.astype(kind))
            replay()
            found = tileattn.forward(q, k, v, causal=True, cu_seqlens_q=given)
            assert bits(results) == bits(found)


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda x: x.__name__)
def test_lengths_on_the_device_alone(dtype: Any) -> None:
    """The device aligns the last query with the last key that exists."""
    given = arrays(QUERIES, KEYS, dtype, 64, 64)
    lengths = sent(OPTIONS["lengths"]["kv_lengths"])
    check(given, {"causal": True, "kv_lengths": lengths, **offsets(QUERIES, KEYS)})


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32], ids=lambda x: x.__name__)
def test_one_long_sequence_among_many_short_ones(dtype: Any, D: int) -> None:
    given = arrays(MANY, MANY, dtype, D, D)
    check(given, {"causal": True, **there(MANY, MANY)})


@pytest.mark.parametrize("D", [64, 128])
def test_tiles_that_go_past_the_end_of_a_sequence(D: int) -> None:
    """Rows of the next sequence overflow if a tile treats them as rows of this one."""
    lengths = [127, 255, 0, 1, 79, 81, 160, 300, 128, 47]
    q, k, v, dout = arrays(lengths, lengths, ml_dtypes.bfloat16, D, D)
    check([4 * abs(q), -4 * abs(k), v, dout], there(lengths, lengths))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
def test_no_tokens(lengths: list[int]) -> None:
    given = arrays(lengths, lengths, np.float16, 64, 64)
    results = both(given, there(lengths, lengths))
    assert [x.shape[1] for x in results] == [0] * 5


def test_the_gradient_of_an_array_that_functions_read() -> None:
    """Summed over all sequences; some elements are a sequence's own."""
    q, k, v, dout = arrays(QUERIES, KEYS, np.float64, 32, 32)
    table = np.random.default_rng(3).normal(size=(len(KEYS), 40))
    options: dict[str, Any] = {"score_mod": lambda s, b, h, i, j, t: s * t[b, (h + i + j) % 40]}
    check((q, k, v, dout), {**options, "aux": (table,), **there(QUERIES, KEYS)})
