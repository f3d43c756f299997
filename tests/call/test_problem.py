"""What ``parse`` makes of a call, and the message for everything that it refuses."""

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tileattn.call.options import OPTIONS, Options
from tileattn.call.parse import check_array, parse
from tileattn.call.problem import Problem

Array = NDArray[Any]

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 3, 7, 5, 4, 8
SHAPE = f"(B, Hq, Nq, Nk) = ({B}, {HQ}, {NQ}, {NK})"
BF16 = ml_dtypes.bfloat16
FLOATS = "float16, bfloat16, float32 or float64"

Q = np.zeros((B, HQ, NQ, D), np.float32)
K = np.zeros((B, HKV, NK, D), np.float32)
V = np.zeros((B, HKV, NK, DV), np.float32)


def refused(error: type[Exception], message: str, **changed: Any) -> None:
    call: dict[str, Any] = {"q": Q, "k": K, "v": V, **changed}
    q, k, v = (call.pop(name) for name in ("q", "k", "v"))
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        parse(q, k, v, call)


# --- q, k and v ---------------------------------------------------------------------------------

ARRAY = "must be a NumPy or CuPy array; got {1} (numpy.asarray({0}) makes one)"
RANKS = "must have shape (N, D), (H, N, D) or (B, H, N, D)"
DTYPE = f"must have dtype {FLOATS}"


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("q", [[1.0]], TypeError, ARRAY.format("q", "[[1.0]]")),
        ("q", Q.astype(int), TypeError, f"{DTYPE}; got int64"),
        ("k", K.astype(int), TypeError, f"{DTYPE}; got int64"),
        ("k", K.astype("f8"), TypeError, "must have the dtype of q, float32; got float64"),
        ("v", V.astype(BF16), TypeError, "must have the dtype of q, float32; got bfloat16"),
        ("q", Q[0, 0, 0], ValueError, f"{RANKS}; got ({D},)"),
        ("q", Q[None], ValueError, f"{RANKS}; got (1, {B}, {HQ}, {NQ}, {D})"),
        ("k", K[0], ValueError, "must have as many axes as q, 4; got shape (3, 5, 4)"),
        ("k", K[:1], ValueError, "must have the batch size of q, 2; got 1"),
        ("v", V[:1], ValueError, "must have the batch size of q, 2; got 1"),
        ("k", K[..., :3], ValueError, "must have the head dimension of q, 4; got 3"),
        ("v", V[:, :2], ValueError, "must have the number of heads of k, 3; got 2"),
        ("v", V[:, :, :4], ValueError, "must have the length of k, 5; got 4"),
    ],
)
def test_arrays_refused(name: str, value: Any, error: type[Exception], message: str) -> None:
    refused(error, f"{name} {message}", **{name: value})


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 3), (6, 0)])
def test_key_heads_that_do_not_divide_the_query_heads(Hq: int, Hkv: int) -> None:
    message = f"k must have a number of heads that divides the {Hq} heads of q; got {Hkv}"
    refused(ValueError, message, q=Q[:, :Hq], k=K[:, :Hkv], v=V[:, :Hkv])


# --- options that are arrays --------------------------------------------------------------------


BROADCAST = f"must broadcast to {SHAPE}"


def blocks(*shape: int) -> tileattn.BlockMask:
    return tileattn.BlockMask(np.ones(shape, bool), (4, 4))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("bias", 1.5, TypeError, ARRAY.format("bias", "1.5")),
        ("bias", np.zeros(NK, int), TypeError, f"{DTYPE}; got int64"),
        ("bias", np.zeros((NQ, NK - 1)), ValueError, f"{BROADCAST}; got shape (7, 4)"),
        ("bias", np.zeros((1, 1, 1, 1, NK)), ValueError, f"{BROADCAST}; got shape (1, 1, 1, 1, 5)"),
        ("mask", np.ones(NK, int), TypeError, "must have dtype bool; got int64"),
        ("mask", np.ones((NQ, 2), bool), ValueError, f"{BROADCAST}; got shape (7, 2)"),
        ("alibi_slopes", np.ones(HKV), ValueError, "must have shape (6,) or (2, 6); got (3,)"),
        ("alibi_slopes", np.ones(HQ, int), TypeError, f"{DTYPE}; got int64"),
        ("sinks", np.ones(1), ValueError, "must have shape (6,); got (1,)"),
        ("sinks", np.ones(HQ, bool), TypeError, f"{DTYPE}; got bool"),
        (
            "block_mask",
            np.ones((1, 1), bool),
            TypeError,
            "must be a tileattn.BlockMask; got numpy.ndarray of dtype bool and shape (1, 1) "
            "(BlockMask.from_mask makes one from a boolean array)",
        ),
        (
            "block_mask",
            blocks(3, 2),
            ValueError,
            "must have blocks that broadcast over batch and heads to (2, 6, 2, 2), for Nq=7, Nk=5 "
            "and blocks of (4, 4); got (1, 1, 3, 2)",
        ),
    ],
)
def test_array_options(name: str, value: Any, error: type[Exception], message: str) -> None:
    refused(error, f"{name} {message}", **{name: value})


def test_a_block_mask_is_used() -> None:
    assert parse(Q, K, V, {"block_mask": blocks(2, 2)})[0].enabled_options == {"block_mask"}


INTEGERS = "must be an integer, or integers of shape (2,)"
NDARRAY = "numpy.ndarray of dtype"
LIMIT = "must hold integers up to 2**60 in size"


@pytest.mark.parametrize("name", ["kv_lengths", "q_offset"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1.0, TypeError, f"{INTEGERS}; got 1.0"),
        (True, TypeError, f"{INTEGERS}; got True"),
        ([1, [2]], TypeError, f"{INTEGERS}; got [1, [2]]"),
        ([1.0, 2.0], TypeError, f"{INTEGERS}; got [1.0, 2.0]"),
        (np.ones(2, bool), TypeError, f"{INTEGERS}; got {NDARRAY} bool and shape (2,)"),
        (1 << 80, TypeError, f"{INTEGERS}; got {1 << 80}"),
        ([1, 2, 3], ValueError, f"{INTEGERS}; got shape (3,)"),
        ([], ValueError, f"{INTEGERS}; got shape (0,)"),
        (1 << 61, ValueError, f"{LIMIT}; got 2305843009213693952"),
        (np.array([0, 2**64 - 1], "u8"), ValueError, f"{LIMIT}; got 18446744073709551615"),
        (-(1 << 63), ValueError, f"{LIMIT}; got -9223372036854775808"),
    ],
)
def test_integers_refused(name: str, value: Any, error: type[Exception], message: str) -> None:
    refused(error, f"{name} {message}", **{name: value})


@pytest.mark.parametrize(("lengths", "wrong"), [([0, 6], 6), ([-1, 5], -1), (7, 7)])
def test_lengths_past_the_keys(lengths: Any, wrong: int) -> None:
    message = f"kv_lengths must be from 0 to Nk = 5; got {wrong}"
    refused(ValueError, message, kv_lengths=lengths)


@pytest.mark.parametrize(
    "value", [3, (3, 3), [3, 3], np.int8(3), np.array(3), np.array([3, 3], np.uint16)]
)
def test_every_form_of_integers_is_accepted(value: Any) -> None:
    for name in ("kv_lengths", "q_offset"):
        array = getattr(parse(Q, K, V, {name: value})[1], name)
        np.testing.assert_array_equal(array, [3, 3])
        assert array.dtype == np.int64


# --- options that are numbers -------------------------------------------------------------------

FINITE = "a finite number or None"
CAP = "a positive number, or None for no cap"
PROBABILITY = "a number from 0 up to, but not including, 1"
SEED = "an integer from 0 to 2**64 - 1"
PAIR = "a pair (left, right), each a non-negative integer or None, or None"
NOT_ONE = "not -1, for an open side"
FLAG = "True or False"


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("scale", "1", TypeError, f"{FINITE}; got '1'"),
        ("scale", True, TypeError, f"{FINITE}; got True"),
        ("scale", 1j, TypeError, f"{FINITE}; got 1j"),
        ("scale", np.timedelta64(1), TypeError, f"{FINITE}; got np.timedelta64(1)"),
        ("scale", np.zeros(1), TypeError, f"{FINITE}; got {NDARRAY} float64 and shape (1,)"),
        ("scale", -(10**400), ValueError, f"{FINITE}; got an integer of 1329 bits"),
        ("scale", math.nan, ValueError, f"{FINITE}; got nan"),
        ("softcap", [1.0], TypeError, f"{CAP}; got [1.0]"),
        ("softcap", 0, ValueError, f"{CAP}; got 0"),
        ("dropout_p", None, TypeError, f"{PROBABILITY}; got None"),
        ("dropout_p", 1.0, ValueError, f"{PROBABILITY}; got 1.0"),
        ("dropout_p", -0.1, ValueError, f"{PROBABILITY}; got -0.1"),
        ("seed", None, TypeError, f"{SEED}; got None"),
        ("seed", 1.0, TypeError, f"{SEED}; got 1.0"),
        ("seed", -1, ValueError, f"{SEED}; got -1"),
        ("seed", 1 << 64, ValueError, f"{SEED}; got 18446744073709551616"),
        ("causal", 1, TypeError, f"{FLAG}; got 1"),
        ("causal", None, TypeError, f"{FLAG}; got None"),
        ("window", 3, TypeError, f"{PAIR}; got 3"),
        ("window", (3,), TypeError, f"{PAIR}; got (3,)"),
        ("window", (1.0, None), TypeError, f"{PAIR}; got (1.0, None)"),
        ("window", (-1, 2), ValueError, f"{PAIR}, with None, {NOT_ONE}; got (-1, 2)"),
        ("window", [2, -3], ValueError, f"{PAIR}; got [2, -3]"),
    ],
)
def test_numbers_refused(name: str, value: Any, error: type[Exception], message: str) -> None:
    refused(error, f"{name} must be {message}", **{name: value})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("casual", " (did you mean 'causal'?)"),
        ("sink", " (did you mean 'sinks'?)"),
        ("softmax_scale", " (did you mean 'scale'?)"),  # not 'softcap', which looks like it
        ("enable_gqa", " (leave it out: k may have fewer heads than q)"),
        ("xyz", ""),
    ],
)
def test_unknown_options(name: str, hint: str) -> None:
    accepted = ", ".join(Options.__annotations__)
    refused(TypeError, f"unknown option {name!r}{hint}; the options are {accepted}", **{name: 1})


def test_each_option_has_a_record_and_a_type() -> None:
    assert list(OPTIONS) == list(Options.__annotations__)


# --- what is accepted ---------------------------------------------------------------------------


def test_defaults() -> None:
    problem, operands = parse(Q, K, V, {})
    assert problem == Problem(
        *(B, HQ, HKV, NQ, NK, D, DV),
        dtype=np.dtype(np.float32),
        scale=0.5,
        softcap=None,
        window=(None, None),
        dropout_p=0.0,
        seed=0,
        ndim=4,
        enabled_options=frozenset(),
    )
    assert problem.group == 2
    assert problem.out_shape == (B, HQ, NQ, DV)
    assert hash(problem) == hash(parse(Q, K, V, {})[0])
    np.testing.assert_array_equal(operands.kv_lengths, [NK, NK])
    np.testing.assert_array_equal(operands.q_offset, [NK - NQ] * B)
    for name in ("bias", "mask", "block_mask", "alibi_slopes", "sinks"):
        assert getattr(operands, name) is None


def test_defaults_given_by_hand_are_the_defaults() -> None:
    given = dict.fromkeys(Options.__annotations__) | {"dropout_p": 0, "seed": 0}
    given |= {"causal": False, "invariant": False}
    assert parse(Q, K, V, given)[0] == parse(Q, K, V, {})[0]


@pytest.mark.parametrize("number", [np.float32, np.float64, np.int16, BF16, np.array])
def test_numbers_of_numpy_are_numbers(number: Any) -> None:
    plain = parse(Q, K, V, {"scale": 2, "softcap": 3, "seed": 5})[0]
    given = {"scale": number(2), "softcap": number(3), "seed": np.uint8(5)}
    assert parse(Q, K, V, given)[0] == plain
    zero = parse(Q, K, V, {"dropout_p": number(0), "seed": np.array(0)})[0]
    assert zero == parse(Q, K, V, {})[0]


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({"causal": True}, (None, 0)),
        ({"window": (2, 3)}, (2, 3)),
        ({"window": [np.int64(2), None]}, (2, None)),
        ({"window": (2, 3), "causal": True}, (2, 0)),
        ({"window": (None, None), "causal": np.True_}, (None, 0)),
        ({"window": (1 << 70, 1 << 63), "q_offset": 0}, (1 << 61, 1 << 61)),
    ],
)
def test_causal_is_a_window(options: dict[str, Any], window: tuple[int | None, int | None]) -> None:
    assert parse(Q, K, V, options)[0].window == window


@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({"window": (NK - 2, NQ - 2)}, (NK - 2, NQ - 2)),
        ({"window": (NK - 1, NQ - 1)}, (None, None)),
        ({"window": (NK - 1, 0)}, (None, 0)),
        # A sequence's bits may not depend on how long others are.
        ({"window": (NK - 1, 0), "kv_lengths": [4, 0]}, (NK - 1, 0)),
        ({"window": (0, NQ - 1)}, (0, NQ - 1)),
        ({"window": (None, NQ - 1)}, (None, None)),
        ({"window": (NK - 1, NQ - 1), "q_offset": NK - NQ}, (NK - 1, NQ - 1)),
    ],
)
def test_a_side_that_hides_no_key_is_open(
    options: dict[str, Any], window: tuple[int | None, int | None]
) -> None:
    assert parse(Q, K, V, options)[0].window == window


def test_offset_follows_the_lengths_unless_it_is_given() -> None:
    operands = parse(Q, K, V, {"kv_lengths": [4, 0]})[1]
    np.testing.assert_array_equal(operands.q_offset, [4 - NQ, -NQ])
    operands = parse(Q, K, V, {"kv_lengths": [4, 0], "q_offset": -2})[1]
    np.testing.assert_array_equal(operands.q_offset, [-2, -2])


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [("f2", np.float32), (BF16, np.float32), ("f4", np.float32), ("f8", np.float64)],
)
def test_dtype_of_sums(dtype: Any, sums: Any) -> None:
    problem, _ = parse(Q.astype(dtype), K.astype(dtype), V.astype(dtype), {})
    assert problem.dtype == dtype
    assert problem.accum_dtype == sums


def test_arrays_become_views_with_four_axes() -> None:
    bias, mask = np.zeros((HQ, 1, NK)), np.ones(NK, bool)
    slopes = np.ones(HQ)
    _, operands = parse(Q, K, V, {"bias": bias, "mask": mask, "alibi_slopes": slopes})
    for view, array, shape in (
        (operands.bias, bias, (1, HQ, 1, NK)),
        (operands.mask, mask, (1, 1, 1, NK)),
        (operands.alibi_slopes, slopes, (1, HQ)),
    ):
        assert view.shape == shape
        assert np.shares_memory(view, array)
    problem, operands = parse(Q[0, 0], K[0, 0], V[0, 0], {})
    assert problem.ndim == 2
    assert problem.out_shape == (NQ, DV)
    assert operands.q.shape == (1, 1, NQ, D)
    assert np.shares_memory(operands.q, Q)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1.0], TypeError, "lse " + ARRAY.format("lse", "[1.0]")),
        (np.zeros((2, 3)), TypeError, "lse must have dtype float32; got float64"),
        (np.zeros((2, 3), ">f4"), TypeError, "lse must have dtype float32; got >f4"),
        (np.zeros((3, 2), np.float32), ValueError, "lse must have shape (2, 3); got (3, 2)"),
    ],
)
def test_check_array(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check_array("lse", x, (2, 3), np.dtype(np.float32))


def test_a_problem_is_a_kind_and_its_numbers() -> None:
    def problem(**options: Any) -> Problem:
        return parse(Q, K, V, options)[0]

    for options in ({}, {"causal": True, "softcap": 2.0}, {"prefix": 3, "window": (1, 0)}):
        found = problem(**options)
        assert Problem.of(found.kind, found.numbers) == found
    one = problem(window=(2, 0), dropout_p=0.5, seed=1, scale=0.25, softcap=3.0, kv_lengths=4)
    other = problem(window=(1, 3), dropout_p=0.1, seed=9, scale=0.5, softcap=7.0, kv_lengths=2)
    assert one.kind == other.kind
    assert hash(one.kind) == hash(other.kind)
    assert one.numbers != other.numbers
    assert one.kind != problem(window=(2, None), dropout_p=0.5, seed=1, softcap=3.0).kind
