"""What ``parse`` makes of a call, and the message for everything that it refuses."""

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import tileattn
from tileattn.problem import Options, Problem, check_array, parse

Array = NDArray[Any]

B, HQ, HKV, NQ, NK, D, DV = 2, 6, 3, 7, 5, 4, 8
SHAPE = f"(B, Hq, Nq, Nk) = ({B}, {HQ}, {NQ}, {NK})"
BF16 = ml_dtypes.bfloat16
FLOATS = "float16, bfloat16, float32, float64"

Q = np.zeros((B, HQ, NQ, D), np.float32)
K = np.zeros((B, HKV, NK, D), np.float32)
V = np.zeros((B, HKV, NK, DV), np.float32)


def refused(error: type[Exception], message: str, **changed: Any) -> None:
    call: dict[str, Any] = {"q": Q, "k": K, "v": V, **changed}
    q, k, v = (call.pop(name) for name in ("q", "k", "v"))
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        parse(q, k, v, call)


# --- q, k and v ---------------------------------------------------------------------------------

CONVERT = "a NumPy or CuPy array is accepted (numpy.asarray({0}) makes one)"
RANKS = "accepted are (N, D), (H, N, D) and (B, H, N, D)"


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("q", [[1.0]], TypeError, "is list; " + CONVERT),
        ("q", Q.astype(int), TypeError, f"has dtype int64; accepted are {FLOATS}"),
        ("q", Q.astype(object), TypeError, f"has dtype object; accepted are {FLOATS}"),
        ("q", Q.astype(complex), TypeError, f"has dtype complex128; accepted are {FLOATS}"),
        ("q", Q.astype(bool), TypeError, f"has dtype bool; accepted are {FLOATS}"),
        ("k", K.astype(int), TypeError, f"has dtype int64; accepted are {FLOATS}"),
        ("k", K.astype("f8"), TypeError, "has dtype float64; it must be that of q, float32"),
        ("v", V.astype(BF16), TypeError, "has dtype bfloat16; it must be that of q, float32"),
        ("q", Q[0, 0, 0], ValueError, f"has shape ({D},); {RANKS}"),
        ("q", Q[None], ValueError, f"has shape (1, {B}, {HQ}, {NQ}, {D}); {RANKS}"),
        ("k", K[0], ValueError, "has 3 axes; it must have as many as q, 4"),
        ("v", V[0, 0], ValueError, "has 2 axes; it must have as many as q, 4"),
        ("k", K[:1], ValueError, "has batch size 1; it must be that of q, 2"),
        ("v", V[:1], ValueError, "has batch size 1; it must be that of q, 2"),
        ("k", K[..., :3], ValueError, "has head dimension 3; it must be that of q, 4"),
        ("v", V[:, :2], ValueError, "has 2 heads; it must have as many as k, 3"),
        ("v", V[:, :, :4], ValueError, "has length 4; it must be that of k, 5"),
    ],
)
def test_arrays_refused(name: str, value: Any, error: type[Exception], message: str) -> None:
    refused(error, f"{name} {message.format(name)}", **{name: value})


@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 3), (6, 0)])
def test_key_heads_that_do_not_divide_the_query_heads(Hq: int, Hkv: int) -> None:
    message = f"k has {Hkv} heads; a number that divides the {Hq} heads of q is accepted"
    refused(ValueError, message, q=Q[:, :Hq], k=K[:, :Hkv], v=V[:, :Hkv])


# --- options that are arrays --------------------------------------------------------------------


BROADCAST = f"a shape that broadcasts to {SHAPE} is accepted"


def blocks(*shape: int) -> tileattn.BlockMask:
    return tileattn.BlockMask(np.ones(shape, bool), (4, 4))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("bias", 1.5, TypeError, "is float; " + CONVERT),
        ("bias", np.zeros(NK, int), TypeError, f"has dtype int64; accepted are {FLOATS}"),
        ("bias", np.zeros((NQ, NK - 1)), ValueError, f"has shape (7, 4); {BROADCAST}"),
        ("bias", np.zeros((HKV, NQ, NK)), ValueError, f"has shape (3, 7, 5); {BROADCAST}"),
        ("bias", np.zeros((1, 1, 1, 1, NK)), ValueError, f"has shape (1, 1, 1, 1, 5); {BROADCAST}"),
        ("mask", np.ones(NK, int), TypeError, "has dtype int64; bool is accepted"),
        ("mask", np.ones((NQ, 2), bool), ValueError, f"has shape (7, 2); {BROADCAST}"),
        ("alibi_slopes", np.ones(HKV), ValueError, "has shape (3,); accepted is (6,) and (2, 6)"),
        ("alibi_slopes", np.ones(HQ, int), TypeError, f"has dtype int64; accepted are {FLOATS}"),
        ("sinks", np.ones(1), ValueError, "has shape (1,); accepted is (6,)"),
        ("sinks", np.ones(HQ, bool), TypeError, f"has dtype bool; accepted are {FLOATS}"),
        (
            "block_mask",
            np.ones((1, 1), bool),
            TypeError,
            "is ndarray; a tileattn.BlockMask is accepted "
            "(BlockMask.from_mask makes one from a boolean array)",
        ),
        (
            "block_mask",
            blocks(3, 2),
            ValueError,
            "has (1, 1, 3, 2) blocks of (4, 4); with Nq=7 and Nk=5, a shape that "
            "broadcasts over batch and heads to (2, 6, 2, 2) is accepted",
        ),
    ],
)
def test_array_options(name: str, value: Any, error: type[Exception], message: str) -> None:
    refused(error, f"{name} {message.format(name)}", **{name: value})


def test_a_block_mask_is_used() -> None:
    assert parse(Q, K, V, {"block_mask": blocks(2, 2)})[0].enabled_options == {"block_mask"}


INTEGERS = "integers of shape (2,) are accepted"
ONE = "one integer or shape (2,) is accepted"
LIMIT = "integers up to 2**60 in size are accepted"


@pytest.mark.parametrize("name", ["kv_lengths", "q_offset"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1.0, TypeError, f"is float; {INTEGERS}"),
        (True, TypeError, f"is bool; {INTEGERS}"),
        ("3", TypeError, f"is str; {INTEGERS}"),
        ([1, [2]], TypeError, f"is [1, [2]]; {INTEGERS}"),
        ([1.0, 2.0], TypeError, "has dtype float64; integers are accepted"),
        (np.ones(B, bool), TypeError, "has dtype bool; integers are accepted"),
        (1 << 80, TypeError, "has dtype object; integers are accepted"),
        ([1, 2, 3], ValueError, f"has shape (3,); {ONE}"),
        ([], ValueError, f"has shape (0,); {ONE}"),
        (np.ones((B, 1), int), ValueError, f"has shape (2, 1); {ONE}"),
        (1 << 61, ValueError, f"holds 2305843009213693952; {LIMIT}"),
        (np.array([0, 2**64 - 1], "u8"), ValueError, f"holds 18446744073709551615; {LIMIT}"),
        (-(1 << 63), ValueError, f"holds -9223372036854775808; {LIMIT}"),
    ],
)
def test_integers_refused(name: str, value: Any, error: type[Exception], message: str) -> None:
    refused(error, f"{name} {message}", **{name: value})


@pytest.mark.parametrize(("lengths", "wrong"), [([0, 6], 6), ([-1, 5], -1), (7, 7)])
def test_lengths_past_the_keys(lengths: Any, wrong: int) -> None:
    message = f"kv_lengths holds {wrong}; lengths from 0 to Nk = 5 are accepted"
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

CAP = "a positive number, or None for no cap, is accepted"
PROBABILITY = "a probability in [0, 1) is accepted"
SEED = "an integer from 0 to 2**64 - 1 is accepted"
PAIR = "a pair (left, right) or None is accepted"
OPEN = "each side must be 0 or more, or None to leave it open"


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("scale", "1", TypeError, "str; a finite number is accepted"),
        ("scale", True, TypeError, "bool; a finite number is accepted"),
        ("scale", 1j, TypeError, "complex; a finite number is accepted"),
        ("scale", -(10**400), ValueError, f"{-(10**400)}; a finite number is accepted"),
        ("scale", math.nan, ValueError, "nan; a finite number is accepted"),
        ("scale", -math.inf, ValueError, "-inf; a finite number is accepted"),
        ("softcap", [1.0], TypeError, f"list; {CAP}"),
        ("softcap", 0, ValueError, f"0; {CAP}"),
        ("softcap", -2.5, ValueError, f"-2.5; {CAP}"),
        ("softcap", math.inf, ValueError, f"inf; {CAP}"),
        ("dropout_p", None, TypeError, f"NoneType; {PROBABILITY}"),
        ("dropout_p", 1.0, ValueError, f"1.0; {PROBABILITY}"),
        ("dropout_p", -0.1, ValueError, f"-0.1; {PROBABILITY}"),
        ("dropout_p", math.nan, ValueError, f"nan; {PROBABILITY}"),
        ("seed", 1.0, TypeError, "float; an integer is accepted"),
        ("seed", False, TypeError, "bool; an integer is accepted"),
        ("seed", -1, ValueError, f"-1; {SEED}"),
        ("seed", 1 << 64, ValueError, f"18446744073709551616; {SEED}"),
        ("causal", 1, TypeError, "int; True or False is accepted"),
        ("causal", None, TypeError, "NoneType; True or False is accepted"),
        ("window", 3, TypeError, f"3; {PAIR}"),
        ("window", (3,), TypeError, f"(3,); {PAIR}"),
        ("window", (1.0, None), TypeError, "(1.0, None); each side must be an integer or None"),
        ("window", (None, True), TypeError, "(None, True); each side must be an integer or None"),
        ("window", (-1, 2), ValueError, f"(-1, 2); {OPEN} (as FlashAttention's -1 does)"),
        ("window", [2, -3], ValueError, f"[2, -3]; {OPEN}"),
    ],
)
def test_numbers_refused(name: str, value: Any, error: type[Exception], message: str) -> None:
    refused(error, f"{name} is {message}", **{name: value})


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
    refused(TypeError, f"unknown option {name!r}{hint}; accepted are {accepted}", **{name: 1})


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
    given = dict.fromkeys(Options.__annotations__) | {"causal": False, "dropout_p": 0, "seed": 0}
    assert parse(Q, K, V, given)[0] == parse(Q, K, V, {})[0]


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
        ([1.0], TypeError, "lse is list; " + CONVERT.format("lse")),
        (np.zeros((2, 3)), TypeError, "lse has dtype float64; it must be float32"),
        (np.zeros((2, 3), ">f4"), TypeError, "lse has dtype >f4; it must be float32"),
        (np.zeros((3, 2), np.float32), ValueError, "lse has shape (3, 2); it must be (2, 3)"),
    ],
)
def test_check_array(x: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        check_array("lse", x, (2, 3), np.dtype(np.float32))
