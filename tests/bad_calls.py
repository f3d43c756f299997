"""Bad calls at random: a valid call of an entry, of which one argument is broken in one way."""

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import tileattn
from tileattn import BlockMask, reference
from tileattn.testing import error_bound

Array = NDArray[Any]
Break = Callable[[Any], Any]

B, HQ, HKV, NQ, NK, D, DV = 2, 4, 2, 5, 7, 4, 6
PAGE = 3


class Foreign:
    """What is no array, and has some attributes of one."""

    def __init__(self, x: Any) -> None:
        self.shape, self.dtype = np.shape(x), getattr(x, "dtype", np.dtype(int))
        self.ndim, self.strides = len(self.shape), (8,) * np.ndim(x)


class Wild:
    """What is equal to nothing, has no length and no text."""

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
"""What no argument may be."""

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
"""What an array of floats may not be."""

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
"""What lengths, offsets and tables may not be."""

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
} | {"unknown": always(["x"]), "number": always(3), "of no array": always(["q", "bias"])}
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
AUX = {
    **THINGS,
    "array": always(np.ones((HQ, NQ), np.float32)),
    "number": always(3),
    **{
        f"{name} in it": lambda x, make=make: (make(x[0]),)
        for name, make in ARRAYS.items()
        if name not in ("long doubles", "a long axis", "a long first axis")
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
SOFTCAP = and_more(NUMBERS, zero=always(0.0), negative=always(-1.0))


class Entry(NamedTuple):
    """A public function, a valid call of it, and how its arguments are broken."""

    call: Callable[..., Any]
    valid: Callable[[], dict[str, Any]]
    breaks: dict[str, dict[str, Break]]


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"q": (B, HQ, NQ, D), "k": (B, HKV, NK, D), "v": (B, HKV, NK, DV)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def scored(s: Any, _b: Any, h: Any, i: Any, _j: Any, t: Any) -> Any:
    return s + t[h, i]


def visible(_b: Any, _h: Any, i: Any, j: Any, _t: Any) -> Any:
    return i + 3 >= j


def dense() -> dict[str, Any]:
    return arrays() | {
        "scale": 0.5,
        "softcap": 2.0,
        "alibi_slopes": np.ones(HQ, np.float32),
        "bias": np.ones((NQ, NK), np.float32),
        "causal": True,
        "window": (3, 1),
        "mask": np.ones((B, 1, NQ, NK), bool),
        "block_mask": BlockMask(np.ones((2, 2), bool), (4, 4)),
        "kv_lengths": [7, 6],
        "q_offset": [1, 2],
        "sinks": np.ones(HQ, np.float32),
        "tree_mask": np.ones((1, NQ, NQ), bool),
        "origin": (0, 1, 2, 3),
        "dropout_p": 0.25,
        "seed": 7,
        "score_mod": scored,
        "mask_mod": visible,
        "aux": (np.ones((HQ, NQ), np.float32),),
    }


OPTIONS: dict[str, dict[str, Break]] = {
    "scale": NUMBERS,
    "softcap": SOFTCAP,
    "alibi_slopes": ARRAYS,
    "bias": {name: make for name, make in ARRAYS.items() if name != "no axes"},
    "causal": FLAGS,
    "window": WINDOW,
    "mask": {name: make for name, make in BOOLEANS.items() if name != "no axes"},
    "block_mask": MASK,
    "kv_lengths": LENGTHS_OF_KEYS,
    "q_offset": INTEGERS,
    "sinks": ARRAYS,
    "tree_mask": BOOLEANS,
    "origin": and_more(INTEGERS, negative=always((0, 0, -1, 0)), number=always(3)),
    "dropout_p": PROBABILITY,
    "seed": SEED,
    "score_mod": FUNCTIONS,
    "mask_mod": FUNCTIONS,
    "aux": AUX,
}
GIVEN = dict.fromkeys("qkv", ROWS)
DENSE = GIVEN | OPTIONS


def packed() -> dict[str, Any]:
    flat = {name: x[0] for name, x in arrays().items()}
    return flat | {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 4, 7], "kv_lengths": [3, 3]}


PACKED = {
    "q": without(ROWS, "a long first axis"),  # of heads
    "k": ROWS,
    "v": without(ROWS, "a long axis"),  # of Dv
    "cu_seqlens_q": OFFSETS,
    "cu_seqlens_k": OFFSETS,
    "kv_lengths": LENGTHS_OF_KEYS,
    "q_offset": INTEGERS,
}


def paged() -> dict[str, Any]:
    return arrays() | {
        "k": np.ones((9, HKV, PAGE, D), np.float32),
        "v": np.ones((9, HKV, PAGE, DV), np.float32),
        "block_table": [[0, 3], [1, 8]],
        "kv_lengths": [4, 6],
    }


POOL = without(ROWS, "a long first axis")
PAGED = {
    "q": without(ROWS, "a long first axis"),  # which kv_lengths do not fit
    "k": POOL,
    "v": without(ROWS, "a long axis"),
    "block_table": TABLE,
    "kv_lengths": and_more(LENGTHS_OF_KEYS, none=always(None)),
}


def gradients() -> dict[str, Any]:
    call = dense()
    out, lse = tileattn.forward(**call, backend="numpy")
    return call | {"dout": out, "out": out, "lse": lse, "dlse": lse, "deterministic": True}


UPSTREAM = {"dout": ROWS, "out": ROWS, "lse": ROWS, "deterministic": FLAGS}
UPSTREAM["dlse"] = {name: make for name, make in ROWS.items() if name != "none"}
OF_ORACLE = {  # results may have any dtype
    name: {way: make for way, make in breaks.items() if way != "float64"}
    for name, breaks in UPSTREAM.items()
}
OF_ORACLE |= {
    name: {way: make for way, make in OF_ORACLE[name].items() if way != "none"}
    for name in ("out", "lse")
}


def with_out() -> dict[str, Any]:
    return dense() | {"backend": "numpy", "out": np.zeros((B, HQ, NQ, DV), np.float32)}


def on_llvm(**call: Any) -> Any:
    return tileattn.forward(backend="llvm", **call)


def workspace(**call: Any) -> Any:
    return tileattn.backward(**call)


def pullback(**call: Any) -> Any:
    given = {name: call.pop(name) for name in ("dout", "dlse", "deterministic", "wrt")}
    return tileattn.vjp(**call)[1](**given)


def of_pullback() -> dict[str, Any]:
    call = gradients() | {"wrt": ["q"]}
    return {name: x for name, x in call.items() if name not in ("out", "lse")}


def caches() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    table = np.ones((50, D // 2), np.float32)
    shapes = {"k_cache": NK, "v_cache": NK, "k": 2, "v": 2}
    drawn = {
        name: rng.normal(size=(B, HKV, n, D if name[0] == "k" else DV)).astype(np.float32)
        for name, n in shapes.items()
    }
    return drawn | {"kv_lengths": [1, 3], "rotary": (table, table), "interleaved": True}


CACHE = and_more(ROWS, read_only=lambda x: np.broadcast_to(x[..., :1], x.shape))
CACHES = {
    "k_cache": CACHE,
    "v_cache": CACHE,
    "k": ROWS,
    "v": ROWS,
    "kv_lengths": and_more(LENGTHS_OF_KEYS, none=always(None)),
    "cu_seqlens": INTEGERS,
    "interleaved": FLAGS,
    "rotary": {
        **THINGS,
        "one": lambda x: x[:1],
        "list": list,
        "texts": always(("a", "b")),
        "array": lambda x: x[0],
        "short": lambda x: (x[0][:2], x[1][:2]),
    },
}


def pools() -> dict[str, Any]:
    pool = paged()
    new = {name: x for name, x in caches().items() if name in ("k", "v")}
    return new | {
        "k_cache": pool["k"],
        "v_cache": pool["v"],
        "block_table": [[0, 3], [1, 8]],
        "kv_lengths": [1, 3],
    }


ROPE = {
    "x": {name: make for name, make in REQUIRED.items() if "axis" not in name},
    "cos": {name: make for name, make in REQUIRED.items() if name != "a long first axis"},
    "sin": REQUIRED,
    "positions": and_more(INTEGERS, negative=always(-1), past=always(1000)),
    "interleaved": FLAGS,
    "inverse": FLAGS,
}


def rotation() -> dict[str, Any]:
    table = np.ones((50, D // 2), np.float32)
    call = {"x": arrays()["q"], "cos": table, "sin": table}
    return call | {"positions": np.arange(NQ), "interleaved": False, "inverse": False}


def parts() -> dict[str, Any]:
    out = np.ones((B, HQ, NQ, DV), np.float32)
    return {"outs": [out, out], "lses": [out[..., 0], out[..., 0]]}


def listed(breaks: dict[str, Break]) -> dict[str, Break]:
    return {name: lambda x, make=make: [x[0], make(x[1])] for name, make in breaks.items()}


PARTS = listed(ROWS) | {
    "an array": np.stack,
    "None": always(None),
    "number": always(3),
    "too few": lambda x: x[:1],
    "nothing": always([]),
}


def blocks() -> dict[str, Any]:
    return {"blocks": np.ones((3, 3), bool), "block_size": (4, 4)}


BLOCKS = {
    name: make
    for name, make in BOOLEANS.items()
    if name not in ("a long axis", "a long first axis")
}
BLOCKS |= {"None": always(None), "one axis": lambda x: x[0]}
del BLOCKS["matrix"]

ENTRIES: dict[str, Entry] = {
    "forward": Entry(tileattn.forward, with_out, DENSE | {"out": OUT, "backend": BACKEND}),
    "forward on llvm": Entry(on_llvm, dense, DENSE),
    "forward, packed": Entry(tileattn.forward, packed, PACKED),
    "forward, paged": Entry(tileattn.forward, paged, PAGED),
    "backward": Entry(
        tileattn.backward, gradients, DENSE | UPSTREAM | {"wrt": NAMES, "workspace": THINGS}
    ),
    "vjp": Entry(tileattn.vjp, dense, DENSE | {"backend": BACKEND, "block_table": TABLE}),
    "pullback": Entry(
        pullback, of_pullback, {k: UPSTREAM[k] for k in ("dout", "dlse", "deterministic")}
    ),
    "explain": Entry(tileattn.explain, dense, DENSE | {"backend": BACKEND}),
    "explain, paged": Entry(tileattn.explain, paged, PAGED),
    "reference.forward": Entry(reference.forward, dense, DENSE),
    "reference.forward, packed": Entry(reference.forward, packed, PACKED),
    "reference.forward, paged": Entry(reference.forward, paged, PAGED),
    "reference.backward": Entry(reference.backward, gradients, DENSE | OF_ORACLE),
    "error_bound": Entry(error_bound, dense, DENSE | {"dout": OF_ORACLE["dlse"]}),
    "append_kv": Entry(tileattn.append_kv, caches, CACHES),
    "append_kv, paged": Entry(
        tileattn.append_kv, pools, {"block_table": TABLE, "kv_lengths": LENGTHS_OF_KEYS}
    ),
    "rope": Entry(tileattn.rope, rotation, ROPE),
    "merge": Entry(tileattn.merge, parts, {"outs": PARTS, "lses": PARTS}),
    "dropout_mask": Entry(
        tileattn.dropout_mask,
        lambda: {"shape": (1, 2, 3, 4), "dropout_p": 0.5, "seed": 3},
        {"shape": LENGTHS, "dropout_p": PROBABILITY, "seed": SEED},
    ),
    "BlockMask": Entry(BlockMask, blocks, {"blocks": BLOCKS, "block_size": PAIR}),
    "BlockMask.from_mask": Entry(
        BlockMask.from_mask,
        lambda: {"mask": np.ones((3, 3), bool), "block_size": (2, 2)},
        {"mask": BLOCKS, "block_size": PAIR},
    ),
    "BlockMask.from_predicate": Entry(
        BlockMask.from_predicate,
        lambda: {
            "visible": lambda b, h, i, j: i >= j + b + h,
            "shape": (1, 1, 8, 8),
            "block_size": (4, 4),
        },
        {"visible": FUNCTIONS, "shape": LENGTHS, "block_size": PAIR},
    ),
}


class BadCall(NamedTuple):
    """A call of which one argument is broken."""

    arguments: dict[str, Any]
    name: str
    way: str


def bad_calls(entry: Entry, count: int, seed: int = 0) -> Iterator[BadCall]:
    """Draw bad calls: the broken argument, how it is broken, and which options there are."""
    rng = np.random.default_rng(seed)
    names = list(entry.breaks)
    for _ in range(count):
        call = entry.valid()
        name = str(rng.choice(names))
        ways = entry.breaks[name]
        way = str(rng.choice([*ways]))
        # Options that no function needs may be there or not.
        for option in ("window", "causal", "bias", "mask", "block_mask", "softcap", "sinks"):
            if option in call and option != name and rng.random() < 0.3:
                del call[option]
        if rng.random() < 0.05:
            yield BadCall(call | {f"{name}s_": 1}, f"{name}s_", "unknown name")
            continue
        call[name] = ways[way](call.get(name))
        yield BadCall(call, name, way)
