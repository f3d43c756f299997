"""Validation of ``window`` and ``causal``: the keys on each side that a query attends to."""

from typing import Any

from tileattn.call.sequences import FAR
from tileattn.messages import must_be
from tileattn.validation import check_flags, integer

_PAIR = "a pair (left, right), each a non-negative integer or None, or None"

Window = tuple[int | None, int | None]


def window_of(window: Any, causal: Any) -> Window:
    """Return both sides of the window; causal is a right side of 0."""
    if type(causal) is not bool:
        check_flags(causal=causal)
    left: int | None = None
    right: int | None = None
    if window is not None:
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise TypeError(must_be("window", _PAIR, window))
        left, right = (_side(side, window) for side in window)
    if causal:
        right = 0
    return left, right


def without_far_sides(window: Window, Nq: int, Nk: int) -> Window:
    """Drop window bounds that mask nothing (bottom-right alignment).

    Both bounds stay if the left one masks keys: kernels choose tiles by the width of the window.
    """
    left, right = window
    if left is None or left >= Nk - 1:
        return None, None if right is None or right >= Nq - 1 else right
    return left, right


def _side(side: Any, window: Any) -> int | None:
    if side is None:
        return None
    minus_one = type(side) is int and side == -1  # an open side in FlashAttention
    what = _PAIR + (", with None, not -1, for an open side" if minus_one else "")
    # No key is further from any position.
    return min(integer("window", side, what, whole=window), 2 * FAR)
