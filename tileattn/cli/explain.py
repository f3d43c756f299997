"""The command ``explain``: show what would run for given sizes and options."""

import argparse
import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import tileattn
from tileattn.backends import registry
from tileattn.backends.protocol import Explanation
from tileattn.call.options import DESCALES, OPTIONS, Option
from tileattn.call.parse import parse
from tileattn.cli.arguments import (
    COUNT,
    INTEGER,
    REAL,
    SIZE,
    add_backend,
    add_json,
    backend_named,
    integers,
    print_json,
    refused,
)
from tileattn.dtypes import CACHE_DTYPES, DTYPES, NAMED
from tileattn.errors import BackendUnavailableError
from tileattn.expressions.functions import read_functions

AXES = {
    "B": "batch size", "Hq": "query heads", "Hkv": "key and value heads", "Nq": "queries",
    "Nk": "keys", "D": "head dimension", "Dv": "value head dimension",
}  # fmt: skip
DEFAULTS = {"B": 1, "Hq": 8, "Nq": 4096, "D": 64}
SAME_AS = {"Hkv": "Hq", "Nk": "Nq, or the longest of --kv-lengths", "Dv": "D"}

OPTION_HELP = {
    "scale": "multiplies the products of queries and keys (default 1/sqrt(D))",
    "softcap": "soft cap of the scores",
    "alibi_slopes": "slopes of ALiBi",
    "bias": "array that is added to the scores",
    "causal": "causal mask",
    "window": "keys attended to each side of a query; None leaves a side open",
    "mask": "boolean mask, whose values do not count",
    "block_mask": "a BlockMask",
    "kv_lengths": "keys that exist: one number, or one for each sequence",
    "q_offset": "position of query 0 on the key axis: one number, or one for each sequence",
    "cu_seqlens_q": "offsets of packed queries, from 0; the last one replaces --Nq",
    "cu_seqlens_k": "offsets of packed keys, from 0; the last one replaces --Nk",
    "tree_mask": "mask of the last keys, one for each query",
    "prefix": "keys that all queries attend to: one number, or one for each sequence",
    "origin": "position in a larger call: batch entry, head, query, key",
    "sinks": "logits that join the softmax denominator",
    "dropout_p": "dropout probability",
    "seed": "seed of dropout",
    "score_mod": "function of the scores",
    "mask_mod": "function that masks pairs",
    "aux": "tuple of the arrays that the functions read",
    "invariant": "the same bits for a row in prefill, chunks and decoding",
}
"""What each option of a call is.

``block_table`` follows from ``--page-size``, and the descales from ``--kv-dtype``.
"""

EXAMPLES = """examples:
  python -m tileattn explain --arch sm_90 --dtype bfloat16 --causal
  python -m tileattn explain --bias 8,4096,4096            one bias for all batch entries
  python -m tileattn explain --cu-seqlens-q 0,1000,1024    two packed sequences
  python -m tileattn explain --B 4 --Nq 1 --page-size 64 --kv-lengths 900,17,4096,512
  python -m tileattn explain --mask-mod my_masks:documents a function of my_masks.py
"""

_MOST_HEADS = 1 << 17  # B * Hq for which tiles are counted in seconds and 1 GB
_MOST_ROWS = 1 << 26  # Nq or Nk, as above


def add_to(commands: Any) -> None:
    """Add the command."""
    about = "show what would run for given sizes and options"
    parser = commands.add_parser(
        "explain",
        help=about,
        description=f"{about}. Options are those of tileattn.forward; arrays are given by their "
        "shapes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sizes = parser.add_argument_group("sizes")
    for size, meaning in AXES.items():
        default = DEFAULTS.get(size, SAME_AS.get(size))
        sizes.add_argument(f"--{size}", type=SIZE, help=f"{meaning} (default {default})")
    pages = "keys are in pages of this many, and --kv-lengths in their first pages"
    sizes.add_argument("--page-size", type=COUNT, metavar="N", help=pages)
    names = [dtype.name for dtype in DTYPES]
    add = parser.add_argument
    add("--dtype", default="float32", choices=names, help="dtype of q, k and v (default float32)")
    eight = "dtype of k and v in a cache of 8 bits, with a descale for each head"
    add("--kv-dtype", choices=[dtype.name for dtype in CACHE_DTYPES], help=eight)
    add_backend(parser, "backend")
    add("--arch", help="plan for this GPU architecture: sm_80, sm_90, ... (no GPU needed)")
    add("--plan", action="store_true", help="with --arch, print the launch plans too")
    add_json(parser)
    options = parser.add_argument_group("options of the call")
    for name, text in OPTION_HELP.items():
        options.add_argument(f"--{name.replace('_', '-')}", **_argument(OPTIONS[name], text))
    parser.set_defaults(run=run)


def _argument(option: Option, text: str) -> dict[str, Any]:
    """Describe an option of a call to argparse, by the type of its value."""
    match option.value:
        case "flag":
            return {"action": "store_true", "default": None, "help": text}
        case "number":
            return {"type": REAL, "metavar": "X", "help": text}
        case "integer":
            return {"type": INTEGER, "metavar": "N", "help": text}
        case "integers":
            return {"type": integers, "metavar": "N[,N...]", "help": text}
        case "window":
            return {"type": _side, "nargs": 2, "metavar": ("LEFT", "RIGHT"), "help": text}
        case "array":
            shape = ", ".join(_AXIS_OF[axis] for axis in option.axes)
            text = f"{text}: its shape (default ({shape}))"
            return {
                "type": integers,
                "nargs": "?",
                "const": (),
                "metavar": "N[,N...]",
                "help": text,
            }
    return {"type": _imported, "metavar": "MODULE:NAME", "help": text}


_AXIS_OF = {"b": "B", "h": "Hq", "i": "Nq", "j": "Nk", ".": "Nq"}  # the last of ``tree_mask``


def _side(text: str) -> int | None:
    """Read a side of the window: a number of keys, or None for an open side."""
    if text == "None":
        return None
    try:
        return int(SIZE(text))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; None leaves a side open") from None


def _imported(text: str) -> Any:
    """Import an object, given as MODULE:NAME; modules in the current folder are found."""
    module, _, name = text.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"must be MODULE:NAME; got {text!r} ({error})") from None
    finally:
        sys.path.pop(0)


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation of a call; return the exit status."""
    if arguments.plan and arguments.arch is None:
        return refused("--plan needs --arch: it prints the launch plans of a GPU")
    try:
        backend = backend_named(arguments.backend)
        q, k, v, options = call_of(arguments)
        plans: list[str] = []
        if arguments.arch is None:
            found = tileattn.explain(q, k, v, backend=backend, **options)
        else:
            found, plans = _explain_on(arguments.arch, backend, (q, k, v), options)
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        return refused(f"{type(error).__name__}: {error}")
    plans = plans if arguments.plan else []
    if arguments.json:
        print_json(asdict(found) | ({"plans": plans} if plans else {}))
    else:
        print("\n\n".join([str(found), *plans]))
    return 0


def call_of(arguments: argparse.Namespace) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return q, k, v and the options of the call that a command line describes."""
    given = {name: getattr(arguments, name) for name in OPTION_HELP}
    options = {name: x for name, x in given.items() if x is not None}
    sizes = _sizes(arguments, options)
    B, Hq, Hkv, Nq, Nk, D, Dv = (sizes[axis] for axis in AXES)
    keys = (B, Hkv, Nk)
    if arguments.page_size is not None:
        entries = len(options["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in options else B
        pages = -(-Nk // arguments.page_size)
        keys = (entries * pages, Hkv, arguments.page_size)
        options["block_table"] = np.arange(entries * pages).reshape(entries, pages)
        options.setdefault("kv_lengths", (Nk,))
    dtype = NAMED[arguments.dtype]
    for name in {"kv_lengths", "q_offset", "prefix"} & options.keys():
        options[name] = options[name][0] if len(options[name]) == 1 else options[name]
    for name, option in OPTIONS.items():
        if option.value == "array" and name in options:
            shape = options[name] or tuple(sizes[_AXIS_OF[axis]] for axis in option.axes)
            options[name] = _placeholder(shape, np.bool_ if option.role == "mask" else dtype)
    if "window" in options:
        options["window"] = tuple(options["window"])
    q = _placeholder((B, Hq, Nq, D), dtype)
    for kv_dtype in CACHE_DTYPES:
        if arguments.kv_dtype == kv_dtype.name:
            dtype = kv_dtype
            options |= dict.fromkeys(DESCALES, _placeholder((Hkv,), np.float32))
    return q, _placeholder((*keys, D), dtype), _placeholder((*keys, Dv), dtype), options


def _sizes(arguments: argparse.Namespace, options: Mapping[str, Any]) -> dict[str, int]:
    """Return the size of each axis; raise ValueError if tiles would take too long to count."""
    sizes = {axis: n for axis in AXES if (n := getattr(arguments, axis)) is not None}
    queries = options.get("cu_seqlens_q") or options.get("cu_seqlens_k")
    if queries is not None:
        sizes.setdefault("Nq", queries[-1])
        sizes.setdefault("Nk", (options.get("cu_seqlens_k") or queries)[-1])
    sizes = DEFAULTS | sizes
    lengths = options.get("kv_lengths") or (sizes["Nq"],)
    same = {"Hkv": sizes["Hq"], "Nk": max(lengths), "Dv": sizes["D"]}
    sizes = same | sizes
    for name, size, most in (
        ("--B times --Hq", sizes["B"] * sizes["Hq"], _MOST_HEADS),
        ("--Nq", sizes["Nq"], _MOST_ROWS),
        ("--Nk", sizes["Nk"], _MOST_ROWS),
    ):
        if size > most:
            raise ValueError(f"{name} must be at most {most:,}; got {size:,}")
    return sizes


def _placeholder(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an array without memory, to be described; its elements are zero, or True."""
    return np.broadcast_to(np.ones((), dtype) if dtype == np.bool_ else np.zeros((), dtype), shape)


def _explain_on(
    arch: str, backend: str, rows: tuple[Any, Any, Any], options: dict[str, Any]
) -> tuple[Explanation, list[str]]:
    """Explain a call for contiguous arrays on a GPU of this architecture; return its plans, too."""
    from tileattn.backends.cupy.explain import explain_on
    from tileattn.kernels.cuda.plan.device import device_of_arch
    from tileattn.kernels.cuda.plan.host_arrays import host_layout
    from tileattn.kernels.cuda.plan.layout import contiguous
    from tileattn.kernels.cuda.plan.plan import plans_of

    if backend not in ("auto", "cupy"):
        raise ValueError(f"--backend must be 'cupy' with --arch; got {backend!r}")
    # Kernels for compute capability 9.0 are compiled for sm_90a.
    arch = "sm_90a" if arch == "sm_90" else arch
    device = device_of_arch(arch)
    _check_arch(arch)
    problem, operands = parse(*rows, read_functions(options))
    registry.supporting([registry.get("cupy")], problem)
    layout = host_layout(operands, lambda x: contiguous(x.shape, x.dtype.name))
    found = explain_on(device, problem, layout, operands)
    return found, list(map(str, plans_of(problem, layout, device)[:2]))


def _check_arch(arch: str) -> None:
    """Raise ValueError for an architecture that is newer than the compiler, or than the table."""
    from tileattn.kernels.cuda.jit.compile import checked_arch
    from tileattn.kernels.cuda.plan.device import GPUS

    try:
        checked_arch(arch)
    except BackendUnavailableError:  # without the compiler
        if not any(re.fullmatch(rf"\w+_{number}[a-z]?", arch) for number in GPUS):
            names = ", ".join(f"sm_{number}" for number in GPUS)
            raise ValueError(f"arch must be one of {names}; got {arch!r}") from None
