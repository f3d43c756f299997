"""What a caller probably meant: the ends of some messages, empty where there is no guess."""

from typing import Any

import numpy as np


def of_dtype(name: str, x: Any, dtypes: tuple[np.dtype[Any], ...]) -> str:
    """Guess at an array whose dtype is not accepted."""
    native = x.dtype.newbyteorder("=")
    if native != x.dtype and native in dtypes:
        return (
            f"; its bytes are swapped, and {name}.astype({name}.dtype.newbyteorder('=')) is native"
        )
    if name == "mask" and x.dtype.kind == "f":
        return "; bias= takes an array that is added to the scores"
    return ""


def of_heads(q: Any, k: Any) -> str:
    """Guess at heads of k that do not divide those of q."""
    if q.ndim < 3 or not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        return ""
    swapped = "x.swapaxes(-3, -2) of each is (B, H, N, D), without a copy"
    return f"; if these are (B, N, H, D), {swapped}"


def of_keys(name: str, x: Any, shape: tuple[int, int, int, int]) -> str:
    """Guess at a bias or mask that does not broadcast."""
    B, _, _, Nk = shape
    if x.shape != (B, Nk):
        return ""
    of_each = f"; {name}[:, None, None, :] has the keys of each batch entry"
    return f"{of_each}, and kv_lengths= masks out those past an end" if name == "mask" else of_each
