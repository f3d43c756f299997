"""Turn a random call into one with keys and values of 8 bits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.dtypes import CACHE_DTYPES, INT8
from tileattn.testing.options import Choices

Array = NDArray[Any]

_LARGEST = {dtype: 127.0 if dtype == INT8 else 448.0 for dtype in CACHE_DTYPES}


def quantise(
    choices: Choices, k: Array, v: Array, options: Mapping[str, Any]
) -> tuple[Array, Array, dict[str, Array | float]]:
    """Return k and v in 8 bits, with their strides' order, and descales of any kind.

    NaN and infinities are NaN in float8_e4m3fn. int8 has -128 in their place, and a descale of NaN
    for the token, if it has a number for each token.
    """
    dtype = choices.one_of(*CACHE_DTYPES)
    if options.get("cu_seqlens_k") is not None:
        entries = len(options["cu_seqlens_k"]) - 1
    else:
        entries = len(k) if k.ndim == 4 else 1
    stored, descales = [], dict[str, Array | float]()
    for name, x in (("k_descale", k), ("v_descale", v)):
        wide = x.astype(np.float64)
        lost: NDArray[np.bool_] = ~np.isfinite(wide)
        largest = np.max(np.abs(wide), where=~lost, initial=0.0)
        unit = float(largest / _LARGEST[dtype]) or 1.0
        of_tokens = np.asarray(lost.any(axis=-1))
        descales[name] = _descale(choices, unit, of_tokens, entries, dtype)
        numbers = np.where(lost, np.nan, wide / unit)
        if dtype == INT8:
            numbers = np.where(lost, -128, np.rint(numbers))
        out = np.empty_like(x, dtype=dtype)
        out[...] = numbers.astype(np.float32).astype(dtype)
        stored.append(out)
    return stored[0], stored[1], descales


def _descale(
    choices: Choices, unit: float, lost: NDArray[np.bool_], entries: int, dtype: np.dtype[Any]
) -> Array | float:
    """Draw a descale near ``unit``; ``lost`` are tokens, (..., Hkv, Nk), that hold no numbers."""
    heads = lost.shape[-2] if lost.ndim > 1 else 1
    kind = choices.one_of("number", "no axes", "heads", "entries", "tokens")
    if kind == "number":
        return float(choices.one_of(unit, 0.0))
    shapes = {"no axes": (), "heads": (heads,), "entries": (entries, heads), "tokens": lost.shape}
    factors = choices.rng.uniform(0.5, 1.5, shapes[kind])
    descale = np.asarray(unit * factors * (choices.rng.random(factors.shape) > 0.1), np.float32)
    if kind == "tokens" and dtype == INT8:
        descale = np.where(lost, np.float32(np.nan), descale)
    if descale.ndim and choices.coin():  # with a step along the last axis
        wide = np.full((*descale.shape[:-1], 2 * descale.shape[-1]), np.nan, np.float32)
        wide[..., ::-2] = descale
        descale = wide[..., ::-2]
    return descale
