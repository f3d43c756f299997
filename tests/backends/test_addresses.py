"""Addresses of NumPy arrays, and whether arrays of known layouts may share bytes."""

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tileattn.backends.addresses import Overlap, address_of


class Named(np.ndarray):
    pass


X = np.zeros((4, 6, 8), np.float32)
ARRAYS = {
    "plain": X,
    "a view": X[1:, ::-2, 3:],
    "read-only": np.broadcast_to(X[0], X.shape),
    "of a subclass": X.view(Named)[1:],
    "masked": np.ma.array(X, mask=False),
    "of bytes between others": np.zeros(9, np.uint8)[1:].view(np.float64),
    "of bfloat16": np.zeros(3, ml_dtypes.bfloat16)[1:],
    "without axes": np.array(1.0),
    "of no elements": X[:, :0],
    "of a buffer": np.frombuffer(b"abcdefgh", np.uint8)[3:],
}


@pytest.mark.parametrize("x", ARRAYS.values(), ids=ARRAYS)
def test_the_address_is_that_which_numpy_gives(x: NDArray[np.generic]) -> None:
    assert address_of(x) == x.__array_interface__["data"][0]


def test_the_bytes_of_arrays_overlap_where_numpy_says_so() -> None:
    memory = np.zeros((6, 7, 8), np.float32)
    views = [
        memory[first : first + 2, ::step, columns]
        for first in range(5)
        for step in (1, -1, 3)
        for columns in (slice(0, 3), slice(4, 8), slice(7, 2, -2))
    ]
    for out in views:
        for x in views:
            found = Overlap(out, [x])(address_of(out), [address_of(x)])
            assert found == np.may_share_memory(out, x)
