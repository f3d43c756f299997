"""Bound the scores of heads: heads with small scores need no running maximum."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.algorithm.heads import SMALL, HeadGroup
from tileattn.algorithm.residuals import row_norms

Array = NDArray[Any]

_MIN_QUERIES = 128  # queries from which the norms of q and k cost less than maxima of tiles

_SAFE_EXPONENT = 30.0  # largest |score| without a running maximum: exp(30) = 1e13 is no overflow


def has_small_scores(heads: HeadGroup) -> bool | Array:
    """Return which heads have scores small enough for ``m = 0``: one bool, or shape (Hkv, G, 1).

    Notes
    -----
    By the Cauchy-Schwarz inequality, ``|scale * q . k| <= |scale| * max |q| * max |k|``. Only
    queries and keys within the window count, so that masked-out memory cannot change the bits of a
    result. Values count because ``acc`` is not divided yet.
    """
    mask, window = heads.mask, heads.mask.window
    if window.Nq < _MIN_QUERIES or window.Nq * mask.Nk <= SMALL:
        return False  # only sizes decide: a head has the same bits in any batch
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
