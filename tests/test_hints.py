"""Messages that guess what a caller meant."""

import numpy as np
import pytest

from tests.test_problem import DV, FLOATS, HKV, HQ, NK, NQ, SHAPE, B, K, Q, V, refused

MISSHAPEN = f"has shape ({B}, {NK}); a shape that broadcasts to {SHAPE} is accepted"


def test_heads_behind_the_sequence() -> None:
    q, k, v = (x.swapaxes(1, 2) for x in (Q, K, V))
    message = (
        f"k has {NK} heads; a number that divides the {NQ} heads of q is accepted; if these are "
        "(B, N, H, D), x.swapaxes(-3, -2) of each is (B, H, N, D), without a copy"
    )
    refused(ValueError, message, q=q, k=k, v=v)
    refused(ValueError, message, q=q[0], k=k[0], v=v[0])


def test_no_guess_where_the_heads_would_fit_neither_way() -> None:
    message = f"k has {HKV} heads; a number that divides the {HQ - 2} heads of q is accepted"
    refused(ValueError, message, q=Q[:, 2:])
    empty = np.zeros((B, HKV, 0, DV), np.float32)
    refused(ValueError, message, q=Q[:, 2:], k=K[:, :, :0], v=empty)


@pytest.mark.parametrize("name", ["q", "bias"])
def test_swapped_bytes(name: str) -> None:
    swapped = Q.astype(Q.dtype.newbyteorder("S"))
    message = (
        f"{name} has dtype {swapped.dtype}; accepted are {FLOATS}; its bytes are swapped, "
        f"and {name}.astype({name}.dtype.newbyteorder('=')) is native"
    )
    refused(TypeError, message, **{name: swapped})


def test_a_mask_that_is_to_be_added() -> None:
    message = (
        "mask has dtype float32; accepted are bool; "
        "bias= takes an array that is added to the scores"
    )
    refused(TypeError, message, mask=np.ones(NK, np.float32))


def test_a_mask_of_keys() -> None:
    message = (
        f"mask {MISSHAPEN}; mask[:, None, None, :] has the keys of each batch entry, "
        "and kv_lengths= masks out those past an end"
    )
    refused(ValueError, message, mask=np.ones((B, NK), bool))


def test_a_bias_of_keys() -> None:
    message = f"bias {MISSHAPEN}; bias[:, None, None, :] has the keys of each batch entry"
    refused(ValueError, message, bias=np.ones((B, NK)))
