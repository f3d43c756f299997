"""Messages that guess what a caller meant."""

import numpy as np
import pytest

from tests.call.test_problem import DV, FLOATS, HKV, HQ, NK, NQ, SHAPE, B, K, Q, V, refused

MISSHAPEN = f"must broadcast to {SHAPE}; got shape ({B}, {NK})"


def test_heads_behind_the_sequence() -> None:
    q, k, v = (x.swapaxes(1, 2) for x in (Q, K, V))
    message = (
        f"k must have a number of heads that divides the {NQ} heads of q; got {NK}; if these are "
        "(B, N, H, D), x.swapaxes(-3, -2) of each is (B, H, N, D), without a copy"
    )
    refused(ValueError, message, q=q, k=k, v=v)
    refused(ValueError, message, q=q[0], k=k[0], v=v[0])


def test_no_guess_where_swapped_axes_would_explain_nothing() -> None:
    message = f"k must have a number of heads that divides the {HQ - 2} heads of q; got {HKV}"
    refused(ValueError, message, q=Q[:, 2:])
    empty = np.zeros((B, HKV, 0, DV), np.float32)
    refused(ValueError, message, q=Q[:, 2:], k=K[:, :, :0], v=empty)
    # Lengths that fit each other, as in self-attention, are longer than the heads are many.
    refused(ValueError, message, q=Q[:, 2:, :NK], k=K, v=V)


@pytest.mark.parametrize("name", ["q", "bias"])
def test_swapped_bytes(name: str) -> None:
    swapped = Q.astype(Q.dtype.newbyteorder("S"))
    message = (
        f"{name} must have dtype {FLOATS}; got {swapped.dtype}; "
        f"{name}.astype({name}.dtype.newbyteorder('=')) swaps its bytes"
    )
    refused(TypeError, message, **{name: swapped})


def test_a_mask_that_is_to_be_added() -> None:
    message = "mask must have dtype bool; got float32; bias= takes what is added to the scores"
    refused(TypeError, message, mask=np.ones(NK, np.float32))


def test_a_mask_of_keys() -> None:
    message = (
        f"mask {MISSHAPEN}; mask[:, None, None, :] adds the axes of heads and queries, "
        "and kv_lengths= masks out keys past an end"
    )
    refused(ValueError, message, mask=np.ones((B, NK), bool))


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_a_matrix_for_each_batch_entry(name: str) -> None:
    message = (
        f"{name} must broadcast to {SHAPE}; got shape ({B}, {NQ}, {NK}); "
        f"{name}[:, None] adds the axis of the heads"
    )
    refused(ValueError, message, **{name: np.ones((B, NQ, NK), bool if name == "mask" else float)})


def test_a_bias_of_keys() -> None:
    message = f"bias {MISSHAPEN}; bias[:, None, None, :] adds the axes of heads and queries"
    refused(ValueError, message, bias=np.ones((B, NK)))
