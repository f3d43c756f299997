"""Random functions of s, b, h, i, j and four arrays, in operators and NumPy's functions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tileattn.expressions.build import FUNCTIONS

Environment = dict[str, Any]
Made = Callable[[Environment], Any]
Draw = Callable[[Any], Any]

B, HQ, NQ, NK = 2, 3, 9, 11
RNG = np.random.default_rng(0)
AUX = (
    RNG.normal(size=HQ),
    RNG.normal(size=(NQ, NK)),
    RNG.integers(-5, 9, NK).astype(np.int32),
    RNG.random((B, NQ)) < 0.5,
)
"""Floats by head; floats by query and key; integers by key; booleans by batch and query."""


def _two(operation: Callable[..., Any]) -> Callable[..., Made]:
    return lambda *made: lambda e: operation(*(one(e) for one in made))


def _named(name: str, x: Any) -> Any:
    return x.named(name, x) if hasattr(x, "named") else FUNCTIONS[name](x)


FLOATS: list[tuple[str, Callable[..., Any]]] = [
    ("ff", np.add),
    ("ff", np.subtract),
    ("fi", np.multiply),
    ("ff", lambda x, y: x * y),
    ("ff", lambda x, y: x / y),
    ("ff", np.minimum),
    ("ff", np.maximum),
    ("bff", np.where),
    ("bfi", np.where),
    ("f", np.negative),
    ("f", abs),
    ("f", np.tanh),
    ("f", np.sin),
    ("f", np.cos),
    ("f", np.log),
    ("f", np.sqrt),
    ("f", np.floor),
    ("f", np.ceil),
    ("f", np.round),
    ("f", np.arctan),
    ("f", lambda x: np.expm1(np.sin(x))),
    ("f", lambda x: np.log1p(x * x)),
    ("f", lambda x: _named("erf", x)),
    ("f", lambda x: _named("sigmoid", x)),
    ("ff", np.logaddexp),
    ("ff", np.remainder),
    ("f", lambda x: x % 0.75),
    ("f", np.square),
    ("f", lambda x: np.exp(np.tanh(x))),
    ("f", lambda x: np.log2(1 + x * x)),
    ("f", lambda x: (1 + x * x) ** 1.5),
    ("f", lambda x: 2.0 ** np.sin(x)),
    ("f", lambda x: x**3),
    ("f", lambda x: np.clip(x, -1.0, 2)),
    ("i", lambda x: x / 3),
    ("i", lambda x: x.astype(float)),
]
INTEGERS: list[tuple[str, Callable[..., Any]]] = [
    ("ii", np.add),
    ("ii", np.subtract),
    ("ii", lambda x, y: x * y),
    ("ii", np.maximum),
    ("ii", lambda x, y: x & y),
    ("ii", lambda x, y: x | y),
    ("ii", np.bitwise_xor),
    ("bii", np.where),
    ("i", lambda x: x // 3),
    ("i", lambda x: x % 4),
    ("i", lambda x: -7 // (abs(x) + 1)),
    ("i", lambda x: x % (abs(x) + 2)),
    ("i", lambda x: x << 2),
    ("i", lambda x: x >> 1),
    ("i", lambda x: ~x),
    ("i", abs),
    ("b", lambda x: x.astype(int)),
    ("f", lambda x: (4 * np.tanh(x)).astype(np.int64)),
]
BOOLEANS: list[tuple[str, Callable[..., Any]]] = [
    ("ii", lambda x, y: x < y),
    ("ii", lambda x, y: x >= y),
    ("ii", lambda x, y: x == y),
    ("ff", lambda x, y: x <= y),
    ("ff", lambda x, y: x > y),
    ("if", lambda x, y: x != y),
    ("bb", lambda x, y: x & y),
    ("bb", np.logical_or),
    ("bb", lambda x, y: x ^ y),
    ("b", lambda x: ~x),
    ("i", np.logical_not),
    ("i", lambda x: np.isin(x, (2, 3, 7))),
    ("f", np.isfinite),
    ("f", np.isnan),
]
OPERATIONS = {"f": FLOATS, "i": INTEGERS, "b": BOOLEANS}


def _element(array: int, *indices: Made) -> Made:
    return lambda e: e["aux"][array][tuple(index(e) for index in indices)]


def _of(name: str) -> Made:
    return lambda e: e[name]


def drawn(draw: Draw, kind: str, depth: int, scores: bool = True) -> Made:
    """Draw a function of a kind: float ``f``, integer ``i`` or boolean ``b``."""
    if depth == 0:
        return _leaf(draw, kind, scores)
    kinds, operation = draw(st.sampled_from(OPERATIONS[kind]))
    parts = [drawn(draw, x, draw(st.integers(0, depth - 1)), scores) for x in kinds]
    return _two(operation)(*parts)


def _leaf(draw: Draw, kind: str, scores: bool) -> Made:
    def index() -> Made:
        return drawn(draw, "i", draw(st.integers(0, 1)), scores)

    if kind == "b":
        choices: Sequence[Callable[[], Made]] = (lambda: _element(3, _of("b"), index()),)
    elif kind == "i":
        names = [_of(name) for name in "bhij"]
        number = draw(st.integers(-3, 12))
        choices = (
            lambda: draw(st.sampled_from(names)),
            lambda: lambda e: 0 * e["i"] + number,
            lambda: _element(2, index()),
        )
    else:
        value = draw(st.sampled_from([-1.5, 0.25, 2.0]))
        choices = (
            *([lambda: _of("s")] * (3 if scores else 0)),
            lambda: lambda e: 0 * e["i"] + value,
            lambda: _element(0, _of("h")),
            lambda: _element(0, index()),
            lambda: _element(1, index(), _of("j")),
        )
    made: Made = draw(st.sampled_from(choices))()
    return made


def as_function(made: Made, scores: bool = True) -> Callable[..., Any]:
    """Give it the parameters of a ``score_mod``, or of a ``mask_mod``."""
    if scores:
        return lambda s, b, h, i, j, *aux: made(
            {"s": s, "b": b, "h": h, "i": i, "j": j, "aux": aux}
        )
    return lambda b, h, i, j, *aux: made({"b": b, "h": h, "i": i, "j": j, "aux": aux})
