"""Heads whose scores are known to be small, so that no running maximum is needed."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.heads import SMALL, HeadGroup
from tileattn.algorithm.residuals import row_norms

Array = NDArray[Any]

_MIN_QUERIES = 128  # from which a look at all norms costs less than the maxima of the tiles

_SAFE_EXPONENT = 30.0
"""Scores within this of zero need no running maximum: exp(30) = 1e13, far from any overflow."""


def has_small_scores(heads: HeadGroup) -> bool | Array:
    """Say which heads have scores so small that ``m = 0`` is right for every row.

    Parameters
    ----------
    heads : HeadGroup
        The heads.

    Returns
    -------
    bool or array of bool, shape (Hkv, G, 1)
        One bool where all heads agree.

    Notes
    -----
    By the Cauchy-Schwarz inequality, ``|scale * q . k| <= |scale| * max |q| * max |k|``. Only rows
    and keys in reach of each other count, so that what nobody attends to cannot change a bit of the
    result. The values count because ``acc`` is not yet divided.
    """
    mask, window = heads.mask, heads.mask.window
    if window.Nq < _MIN_QUERIES or window.Nq * mask.Nk <= SMALL:
        return False  # sizes decide, so that a head has the same bits alone and among others
    if heads.score_mods or not mask.is_window:
        return False
    q = heads.q[..., slice(*window.query_range(0, mask.Nk)), :]
    keys = slice(*window.key_range(0, window.Nq))
    v = heads.kv.values(keys).astype(heads.dtype, copy=False)
    qk = (x.astype(heads.dtype, copy=False) for x in (q, heads.kv.keys(keys)))
    reach = math.prod(row_norms(x).max(axis=-1, initial=0) for x in qk)
    largest = np.maximum(v.max(axis=(2, 3), initial=0), -v.min(axis=(2, 3), initial=0))
    room = np.finfo(heads.dtype).max * math.exp(-_SAFE_EXPONENT) / max(mask.Nk, 1)
    flags: Array = (abs(heads.scale) * reach <= _SAFE_EXPONENT) & (largest < room)
    if flags.all() or not flags.any():
        return bool(flags.all())
    return flags.reshape((*flags.shape, 1))
