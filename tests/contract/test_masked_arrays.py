"""NumPy's masked arrays are refused wherever an array is taken: their masks would be lost."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tileattn
from tileattn import BlockMask

B, HQ, N, D = 2, 3, 4, 5
X = np.ones((B, HQ, N, D), np.float32)
LSE = np.ones((B, HQ, N), np.float32)
PAIRS = np.ones((N, N), np.bool_)


def masked(x: Any) -> Any:
    return np.ma.array(x, mask=False)


def of_backward(**given: Any) -> Any:
    return tileattn.backward(**({"dout": X, "q": X, "k": X, "v": X, "out": X, "lse": LSE} | given))


CALLS: dict[str, Callable[[], Any]] = {
    "q": lambda: tileattn.forward(masked(X), X, X),
    "k": lambda: tileattn.vjp(X, masked(X), X),
    "v": lambda: tileattn.explain(X, X, masked(X)),
    "out": lambda: tileattn.forward(X, X, X, out=masked(X)),
    "bias": lambda: tileattn.forward(X, X, X, bias=masked(X[..., :N])),
    "mask": lambda: tileattn.forward(X, X, X, mask=masked(PAIRS)),
    "alibi_slopes": lambda: tileattn.forward(X, X, X, alibi_slopes=masked(X[0, :, 0, 0])),
    "sinks": lambda: tileattn.forward(X, X, X, sinks=masked(X[0, :, 0, 0])),
    "kv_lengths": lambda: tileattn.forward(X, X, X, kv_lengths=masked(np.array([1, 2]))),
    "q_offset": lambda: of_backward(q_offset=masked(np.array([1, 2]))),
    "dout": lambda: of_backward(dout=masked(X)),
    "lse": lambda: of_backward(lse=masked(LSE)),
    "dlse": lambda: of_backward(dlse=masked(LSE)),
    "workspace": lambda: of_backward(workspace=masked(np.zeros(9, np.uint8))),
    "outs[0]": lambda: tileattn.merge([masked(X)], [LSE]),
    "outs[1]": lambda: tileattn.merge([X, masked(X)], [LSE, LSE]),
    "lses[0]": lambda: tileattn.merge([X], [masked(LSE)]),
    "blocks": lambda: BlockMask(masked(PAIRS)),
    "mask of BlockMask": lambda: BlockMask.from_mask(masked(PAIRS)),
    "the result of visible": lambda: BlockMask.from_predicate(
        lambda _b, _h, i, j: masked(j <= i), (1, 1, N, N)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_masked_array_is_refused_by_name(name: str) -> None:
    argument = name.removesuffix(" of BlockMask").replace("[", r"\[").replace("]", r"\]")
    message = (
        rf"^{argument} must be an? .*; got numpy\.ma\.MaskedArray .* "
        rf"\(the mask would be lost; {argument}\.filled\(\) makes a plain array\)$"
    )
    with pytest.raises(TypeError, match=message):
        CALLS[name]()
