"""The options ``window`` and ``causal``: how many keys a query sees on either side of its own."""

from typing import Any

import numpy as np

from tileattn.lengths import FAR

Window = tuple[int | None, int | None]


def window_of(window: Any, causal: Any) -> Window:
    """Both sides of the window, causal folded into the right one."""
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal is {type(causal).__name__}; True or False is accepted")
    left: int | None = None
    right: int | None = None
    if window is not None:
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise TypeError(f"window is {window!r}; a pair (left, right) or None is accepted")
        left, right = (_side(side, window) for side in window)
    if causal:
        right = 0
    return left, right


def without_far_sides(window: Window, Nq: int, Nk: int) -> Window:
    """Open the sides that hide no key from Nq queries, of which the last is at the last of Nk keys.

    A window whose left side hides some keeps both: its width is how many keys a query attends to.
    """
    left, right = window
    if left is None or left >= Nk - 1:
        return None, None if right is None or right >= Nq - 1 else right
    return left, right


def _side(side: Any, window: Any) -> int | None:
    if side is None:
        return None
    if isinstance(side, bool) or not isinstance(side, int | np.integer):
        raise TypeError(f"window is {window!r}; each side must be an integer or None")
    if side < 0:
        raise ValueError(
            f"window is {window!r}; each side must be 0 or more, or None to leave it open"
            + (" (as FlashAttention's -1 does)" if side == -1 else "")
        )
    return min(int(side), 2 * FAR)  # further than any key is from any position
