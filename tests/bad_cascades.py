"""Bad calls of ``cascade`` at random, as in ``bad_calls``."""

from importlib.util import find_spec
from typing import Any

import numpy as np

import tileattn
from tests.bad_arguments import (
    ARRAYS,
    BACKEND,
    BOOLEANS,
    DESCALE,
    FLAGS,
    HKV,
    HQ,
    INTEGERS,
    NUMBERS,
    SOFTCAP,
    Break,
    always,
    and_more,
    without,
)
from tests.bad_calls import PAGED, Entry, of_jax, paged
from tests.bridges import cascade_on_jax, cascade_on_torch


def shared() -> dict[str, Any]:
    """Make a valid call."""
    call = paged()
    places = {"shared_lengths": [3], "block_table": [[0, 3], [0, 8]], "kv_lengths": [5, 6]}
    options = {"causal": True, "scale": 0.5, "softcap": 2.0, "backend": "numpy"}
    masks = {"tree_mask": np.ones((1, 2, 2), bool), "sinks": np.ones(HQ, np.float32)}
    return call | places | options | masks | {"q": call["q"][:, :, :2]}


def quantised() -> dict[str, Any]:
    call = {name: x.astype(np.int8) if name in ("k", "v") else x for name, x in shared().items()}
    return call | {name: np.ones(HKV, np.float32) for name in ("k_descale", "v_descale")}


SHARED: dict[str, dict[str, Break]] = PAGED | {
    "q": without(PAGED["q"], "no axes"),
    "shared_lengths": and_more(
        INTEGERS,
        none=always(None),
        negative=always(-3),
        no_page=always(2),
        past=always(600),
        three=always([0] * 3),
    ),
    "block_table": and_more(PAGED["block_table"], none=always(None)),
    "causal": FLAGS,
    "scale": NUMBERS,
    "softcap": SOFTCAP,
    "tree_mask": BOOLEANS,
    "sinks": ARRAYS,
    "backend": BACKEND,
}
ENTRIES = {
    "cascade": Entry(tileattn.cascade, shared, SHARED),
    "cascade, 8 bits": Entry(
        tileattn.cascade, quantised, {"k_descale": DESCALE, "v_descale": DESCALE}
    ),
}
if find_spec("torch"):
    ENTRIES["tileattn.torch.cascade"] = Entry(cascade_on_torch, shared, SHARED)
if find_spec("jax"):
    ENTRIES["tileattn.jax.cascade"] = Entry(cascade_on_jax, shared, of_jax(SHARED))
