"""User functions for random problems: score_mod and mask_mod, and arrays for them."""

from typing import Any

import numpy as np

from tileattn.testing.options import Choices, Shape

_REACH = 9


def _relative(s: Any, _b: Any, h: Any, i: Any, j: Any, table: Any, *_: Any) -> Any:
    return s + table[h, np.clip(i - j, -_REACH, _REACH) + _REACH]


def _temperature(s: Any, _b: Any, h: Any, i: Any, j: Any, table: Any, *_: Any) -> Any:
    # A positive factor leaves the pairs masked out that a bias of -inf masks out.
    return np.where(i > j, s * (0.5 + table[h, 0] * table[h, 0]), s)


def _of_keys(s: Any, b: Any, _h: Any, i: Any, j: Any, _table: Any, keys: Any, *_: Any) -> Any:
    return 4.0 * np.tanh(s / 4.0) + keys[b, j] * keys[b, j % 5] - 0.01 * abs(i - j)


def _documents(b: Any, _h: Any, i: Any, j: Any, _table: Any, _keys: Any, ids: Any, _: Any) -> Any:
    return (ids[b, i] == ids[b, j]) | (j == 0)


def _far(_b: Any, h: Any, i: Any, j: Any, _table: Any, _keys: Any, _ids: Any, far: Any) -> Any:
    return (j >= far[h]) & (abs(i - j) < 90 + 10 * h)


def _stripes(_b: Any, _h: Any, i: Any, j: Any, *_: Any) -> Any:
    return ((i - j) % 3 != 1) & (i + j < 400)


SCORES = {"relative": _relative, "temperature": _temperature, "of_keys": _of_keys}
MASKS = {"documents": _documents, "far": _far, "stripes": _stripes}


def draw_functions(
    choices: Choices, score_mod: str | None, mask_mod: str | None, shape: Shape
) -> dict[str, Any]:
    """Return functions, by their names in ``SCORES`` and ``MASKS``, and their ``aux``, as options.

    ``shape`` is (B, Hq, Nq, Nk).
    """
    found: dict[str, Any] = {}
    if score_mod is not None:
        found["score_mod"] = SCORES[score_mod]
    if mask_mod is not None:
        found["mask_mod"] = MASKS[mask_mod]
    if found:
        B, Hq, Nq, Nk = (max(1, n) for n in shape)
        rng, kind = choices.rng, choices.one_of(np.float32, np.float64, np.float16)
        found["aux"] = (
            rng.normal(size=(Hq, 2 * _REACH + 1)).astype(kind),
            rng.normal(size=(B, max(Nk, 5))).astype(np.float32),
            np.sort(rng.integers(0, 4, (B, max(Nq, Nk))), axis=1),
            rng.integers(-5, max(1, Nk // 2), Hq).astype(np.int32),
        )
    return found
