"""Bad calls at random: a valid call of an entry, of which one argument is broken in one way."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

import tileattn
from tests.bad_arguments import (
    ARRAYS,
    AUX,
    BACKEND,
    BOOLEANS,
    DESCALE,
    DV,
    FLAGS,
    FUNCTIONS,
    HKV,
    HQ,
    INTEGERS,
    LENGTHS,
    LENGTHS_OF_KEYS,
    MASK,
    NAMES,
    NK,
    NQ,
    NUMBERS,
    OFFSETS,
    OUT,
    PAGE,
    PAIR,
    PROBABILITY,
    REQUIRED,
    ROWS,
    SEED,
    SOFTCAP,
    TABLE,
    THINGS,
    WINDOW,
    B,
    Break,
    D,
    always,
    and_more,
    without,
)
from tests.bridges import on_jax, on_jax_traced, on_torch
from tileattn import BlockMask, reference
from tileattn.testing import error_bound


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
        "prefix": [4, 0],
        "origin": (0, 1, 2, 3),
        "dropout_p": 0.25,
        "seed": 7,
        "score_mod": scored,
        "mask_mod": visible,
        "aux": (np.ones((HQ, NQ), np.float32),),
        "invariant": True,
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
    "prefix": and_more(INTEGERS, negative=always([4, -1])),
    "origin": and_more(INTEGERS, negative=always((0, 0, -1, 0)), number=always(3)),
    "dropout_p": PROBABILITY,
    "seed": SEED,
    "score_mod": FUNCTIONS,
    "mask_mod": FUNCTIONS,
    "aux": AUX,
    "invariant": FLAGS,
}
GIVEN = dict.fromkeys("qkv", ROWS)
GIVEN["v"] = without(ROWS, "a long axis")  # of Dv
DENSE = GIVEN | OPTIONS


def packed() -> dict[str, Any]:
    flat = {name: x[0] for name, x in arrays().items()}
    return flat | {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 4, 7], "kv_lengths": [3, 3]}


PACKED = {
    "q": without(ROWS, "a long first axis"),  # of heads
    "k": ROWS,
    "v": GIVEN["v"],
    "cu_seqlens_q": OFFSETS,
    "cu_seqlens_k": OFFSETS,
    "kv_lengths": LENGTHS_OF_KEYS,
    "q_offset": INTEGERS,
}


def quantised() -> dict[str, Any]:
    """Make a call whose keys and values have 8 bits."""
    call = {name: x if name == "q" else (20 * x).astype(np.int8) for name, x in arrays().items()}
    descale = np.full(HKV, 0.05, np.float32)
    return call | {"k_descale": descale, "v_descale": descale}


QUANTISED = {name: without(ROWS, "swapped") for name in "kv"} | {
    "q": ROWS,
    "k_descale": DESCALE,
    "v_descale": DESCALE,
}
QUANTISED["v"] = without(QUANTISED["v"], "a long axis")  # of Dv


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
    "v": GIVEN["v"],
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


def bounded() -> dict[str, Any]:
    return dense() | {name: gradients()[name] for name in ("dout", "dlse")}


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
    "interleaved": FLAGS,
    "rotary": {
        **THINGS,
        "one": lambda x: x[:1],
        "list": list,
        "texts in it": always(("a", "b")),
        "array": lambda x: x[0],
        "short": lambda x: (x[0][:2], x[1][:2]),
    },
}


def caches_of_8_bits() -> dict[str, Any]:
    call = {name: x for name, x in caches().items() if name != "rotary"}
    empty = {name: np.zeros(call[name].shape, np.int8) for name in ("k_cache", "v_cache")}
    descale = np.full(HKV, 0.05, np.float32)
    return call | empty | {"k_descale": descale, "v_descale": descale}


def packed_new() -> dict[str, Any]:
    """New keys of both sequences on one axis."""
    call = {name: x for name, x in caches().items() if name != "rotary"}
    flat = {name: call[name].swapaxes(0, 1).reshape(HKV, 2 * B, -1) for name in "kv"}
    return call | flat | {"cu_seqlens": [0, 1, 4]}


def pools() -> dict[str, Any]:
    pool = paged()
    new = {name: x for name, x in caches().items() if name in ("k", "v")}
    return new | {
        "k_cache": pool["k"],
        "v_cache": pool["v"],
        "block_table": [[0, 3], [1, 8]],
        "kv_lengths": [1, 3],
    }


OFFSETS_OF_NEW = without(OFFSETS, "nothing")


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


def second(make: Break) -> Break:
    return lambda x: [x[0], make(x[1])]


def listed(breaks: dict[str, Break]) -> dict[str, Break]:
    return {name: second(make) for name, make in breaks.items()}


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
    "forward, 8 bits": Entry(tileattn.forward, quantised, QUANTISED),
    "reference.forward, 8 bits": Entry(reference.forward, quantised, QUANTISED),
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
    "error_bound": Entry(
        error_bound, bounded, DENSE | {"dout": OF_ORACLE["dlse"], "dlse": OF_ORACLE["dlse"]}
    ),
    "append_kv": Entry(tileattn.append_kv, caches, CACHES),
    "append_kv, 8 bits": Entry(
        tileattn.append_kv,
        caches_of_8_bits,
        dict.fromkeys(("k_cache", "v_cache"), without(CACHE, "swapped"))
        | {"k": ROWS, "v": ROWS, "k_descale": DESCALE, "v_descale": DESCALE},
    ),
    "append_kv, packed": Entry(tileattn.append_kv, packed_new, {"cu_seqlens": OFFSETS_OF_NEW}),
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


def of_jax(breaks: dict[str, dict[str, Break]]) -> dict[str, dict[str, Break]]:
    """Leave out what JAX takes: it makes arrays of 32 bits of those of 64."""
    return {name: without(ways, "float64") for name, ways in breaks.items()}


if find_spec("torch"):
    ENTRIES |= {
        "tileattn.torch.attention": Entry(
            on_torch,
            dense,
            DENSE | {"backend": BACKEND, "return_lse": FLAGS, "deterministic": FLAGS},
        ),
        "tileattn.torch.attention, packed": Entry(on_torch, packed, PACKED),
        "tileattn.torch.attention, paged": Entry(on_torch, paged, PAGED),
        "tileattn.torch.attention, 8 bits": Entry(on_torch, quantised, QUANTISED),
    }
if find_spec("jax"):
    ENTRIES |= {
        "tileattn.jax.attention": Entry(
            on_jax, dense, of_jax(DENSE | {"backend": BACKEND, "return_lse": FLAGS})
        ),
        "tileattn.jax.attention, packed": Entry(on_jax, packed, of_jax(PACKED)),
        "tileattn.jax.attention, paged": Entry(on_jax, paged, of_jax(PAGED)),
        "tileattn.jax.attention, 8 bits": Entry(on_jax, quantised, of_jax(QUANTISED)),
        "tileattn.jax.attention, traced": Entry(on_jax_traced, dense, of_jax(OPTIONS)),
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
            if "q" in call and option in call and option != name and rng.random() < 0.3:
                del call[option]
        if "causal" not in call:
            call.pop("prefix", None)  # which needs it
        if rng.random() < 0.05:
            yield BadCall(call | {f"{name}s_": 1}, f"{name}s_", "unknown name")
            continue
        call[name] = ways[way](call.get(name))
        yield BadCall(call, name, way)
