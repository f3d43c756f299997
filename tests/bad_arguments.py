"""Ways to break an argument, by the kind of the argument."""

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tileattn import BlockMask

Array = NDArray[Any]
Break = Callable[[Any], Any]

B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 5, 7, 4, 6
PAGE = 3


class Foreign:
    """An object with some attributes of an array that is not an array."""

    def __init__(self, x: Any) -> None:
        self.shape, self.dtype = np.shape(x), getattr(x, "dtype", np.dtype(int))
        self.ndim, self.strides = len(self.shape), (8,) * np.ndim(x)


class Wild:
    """An object that equals nothing and has no length and no text."""

    def __eq__(self, _: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]  # on purpose

    def __repr__(self) -> str:
        raise RuntimeError("written down")


def of_dtype(dtype: Any) -> Break:
    return lambda x: np.zeros(np.shape(x), dtype)


def always(value: Any) -> Break:
    return lambda _: value


THINGS: dict[str, Break] = {
    "text": always("abc"),
    "bytes": always(b"abc"),
    "complex": always(1 + 2j),
    "dict": always({"a": 1}),
    "set": always({1, 2}),
    "object": lambda _: object(),
    "wild": lambda _: Wild(),
    "class": always(np.ndarray),
    "decimal": always(Decimal("0.5")),
    "generator": lambda _: (n for n in range(3)),
    "range of text": always(["a", "b"]),
    "ragged": always([[1, 2], [3]]),
    "nested None": always([None, 1]),
    "datetime": always(np.datetime64("2020-01-01")),
    "timedelta": always(np.timedelta64(1, "s")),
    "void": always(np.zeros(1, "i4,f4")[0]),
    "module": always(np),
    "foreign": lambda x: Foreign(np.zeros(3) if x is None else x),
}
"""Values that no argument takes."""

DTYPES: dict[str, Break] = {
    "dates": of_dtype("M8[s]"),
    "times": of_dtype("m8[s]"),
    "objects": of_dtype(object),
    "records": of_dtype("i4,f4"),
    "texts": of_dtype("U3"),
    "complexes": of_dtype(complex),
    "floats of 8 bits": of_dtype(ml_dtypes.float8_e4m3fn),
    "long doubles": of_dtype(np.longdouble),
}

ARRAYS: dict[str, Break] = {
    **THINGS,
    **DTYPES,
    "None in it": lambda x: np.full(np.shape(x), None),
    "list": lambda x: x.tolist(),
    "number": always(3),
    "swapped": lambda x: x.astype(x.dtype.newbyteorder("S")),
    "masked": np.ma.array,
    "matrix": lambda x: np.zeros((2, 3), x.dtype).view(np.matrix),
    "a long axis": lambda x: np.zeros((*x.shape[:-1], x.shape[-1] + 2), x.dtype),
    "a long first axis": lambda x: np.zeros((x.shape[0] + 2, *x.shape[1:]), x.dtype),
    "six axes": lambda x: np.zeros((1,) * (6 - x.ndim) + x.shape, x.dtype),
    "forty axes": lambda x: np.zeros((1,) * 40, x.dtype),
    "no axes": lambda x: np.zeros((), x.dtype),
}
"""Values that are refused for an array of floats."""

INTEGERS: dict[str, Break] = {
    **THINGS,
    **DTYPES,
    "float": always(1.5),
    "floats": of_dtype(float),
    "booleans": of_dtype(bool),
    "boolean": always(True),
    "NaN": always(float("nan")),
    "huge": always(1 << 80),
    "enormous": always(10**5000),
    "huge ones": lambda x: [1 << 70] * max(1, np.size(x)),
    "far": always(1 << 62),
    "a long axis": lambda x: np.zeros((*np.shape(x)[:-1], 90), int),
    "five axes": always(np.zeros((1,) * 5, int)),
    "nothing": always([[[]]]),
    "masked": np.ma.array,
    "deep": lambda _: [[[[1]]]],
}
"""Values that are refused for lengths, offsets and tables."""

NUMBERS: dict[str, Break] = {
    **THINGS,
    "list": always([0.5]),
    "boolean": always(True),
    "NaN": always(float("nan")),
    "NaN of NumPy": always(np.float32("nan")),
    "inf": always(float("inf")),
    "enormous": always(10**5000),
    "one in an array": always(np.ones(1)),
    "many": always(np.ones((2, 3))),
    "boolean in an array": always(np.array(True)),
    "text in an array": always(np.array("a")),
}

FLAGS: dict[str, Break] = {
    **THINGS,
    "one": always(1),
    "zero": always(0),
    "float": always(1.0),
    "None": always(None),
    "list": always([True]),
    "array": always(np.array([True])),
    "number in an array": always(np.array(1)),
}

LENGTHS: dict[str, Break] = {
    **THINGS,
    "number": always(8),
    "three": always((1, 2, 3)),
    "negative": always((1, 2, -3, 4)),
    "floats": always((1.0, 2, 3, 4)),
    "booleans": always((True, 1, 2, 3)),
    "None": always(None),
    "array": always(np.arange(4)),
    "NaN": always((1, 1, float("nan"), 1)),
}

FUNCTIONS: dict[str, Break] = {
    name: make for name, make in THINGS.items() if name not in ("class", "module")
} | {
    "number": always(3),
    "no parameters": always(lambda: 0),
    "one parameter": always(lambda x: x),
    "array": always(np.ones((3, 3), bool)),
    "returns None": always(lambda *_: None),
    "returns text": always(lambda *_: "a"),
    "returns a list": always(lambda *_: [1]),
    "built in": always(len),
    "class": always(int),
}


def without(breaks: dict[str, Break], *names: str) -> dict[str, Break]:
    """Leave out what is valid for one argument."""
    return {name: make for name, make in breaks.items() if name not in names}


def and_more(breaks: dict[str, Break], **more: Break) -> dict[str, Break]:
    return breaks | {name.replace("_", " "): make for name, make in more.items()}


REQUIRED = and_more(ARRAYS, none=always(None))
ROWS = and_more(REQUIRED, float64=lambda x: x.astype(np.float64))
BOOLEANS = and_more(ARRAYS, floats=of_dtype(np.float32), integers=of_dtype(int))
del BOOLEANS["swapped"]
OUT = and_more(
    ROWS,
    read_only=lambda x: np.broadcast_to(x[..., :1], x.shape),
    overlapping=lambda x: np.lib.stride_tricks.as_strided(x, x.shape, (8, 8, 8, 4)),
)
del OUT["none"]
OFFSETS = and_more(
    INTEGERS,
    decreasing=lambda x: [0, 3, 1, *x[3:]],
    start=lambda x: [1, *x[1:]],
    end=lambda x: [*x[:-1], x[-1] + 1],
    number=always(3),
)
LENGTHS_OF_KEYS = and_more(
    INTEGERS, negative=always(-1), past=always(10_000), one_past=lambda x: [1, *x[:-1], 10_000]
)
TABLE = and_more(
    without(INTEGERS, "a long axis"),
    page=lambda x: np.full(np.shape(x), 1000),
    negative=lambda x: np.full(np.shape(x), -1),
    number=always(3),
    one_axis=always([1, 2]),
)
NAMES = {
    name: make
    for name, make in THINGS.items()
    if name not in ("dict", "set", "generator", "range of text")
} | {"unknown": always(["x"]), "number": always(3), "another": always(["q", "lse"])}
WINDOW = without(THINGS, "nested None") | {
    "number": always(5),
    "three": always((1, 2, 3)),
    "minus one": always((-1, 0)),
    "negative": always((3, -2)),
    "float": always((1.0, None)),
    "boolean": always((True, 0)),
    "text in it": always(("a", 1)),
    "array": always(np.array([1, 2])),
    "NaN": always((float("nan"), 0)),
}


def first(make: Break) -> Break:
    return lambda x: (make(x[0]),)


AUX = {
    **THINGS,
    "array": always(np.ones((HQ, NQ), np.float32)),
    "number": always(3),
    **{
        f"{name} in it": first(make)
        for name, make in ARRAYS.items()
        if name not in ("long doubles", "a long axis", "a long first axis", "no axes")
    },
}
BACKEND = {**THINGS, "None": always(None), "number": always(3), "empty": always("")}
MASK = {
    **THINGS,
    "array": always(np.ones((3, 3), bool)),
    "of other sizes": always(BlockMask(np.ones((9, 9), bool))),
}
PAIR = {
    **THINGS,
    "number": always(16),
    "zero": always((16, 0)),
    "negative": always((-1, 4)),
    "float": always((16.0, 4)),
    "boolean": always((True, 4)),
    "one": always((4,)),
    "None": always(None),
}
SEED = and_more(
    NUMBERS, none=always(None), float=always(1.0), negative=always(-1), past=always(1 << 64)
)
PROBABILITY = and_more(NUMBERS, none=always(None), one=always(1.0), negative=always(-0.1))
DESCALE = and_more(
    without(ARRAYS, "number", "no axes"),
    none=always(None),
    boolean=always(True),
    negative=always(-1.0),
    NaN=always(float("nan")),
    inf=always(np.float32("inf")),
    enormous=always(10**5000),
    float64=lambda x: x.astype(np.float64),
    negative_ones=lambda x: -x,
    NaN_in_it=lambda x: x * np.nan,
)
SOFTCAP = and_more(NUMBERS, zero=always(0.0), negative=always(-1.0))
