"""The command ``cache``: show and clear the disk cache of kernels."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from tileattn.kernels import disk_cache as cache

_KINDS = {"cuda": "CUDA", "llvm": "llvm", "": "other"}
"""What the command calls each kind of entry; others are of older versions, or not complete."""

_MIB = 1 << 20


def add_to(commands: Any) -> None:
    """Add the command."""
    about = "show the disk cache of kernels: its folder, its limit, and what is in it"
    parser = commands.add_parser(
        "cache",
        help=about,
        description=f"{about}. TILEATTN_CACHE_DIR sets the folder, TILEATTN_CACHE_BYTES the limit "
        "(default 1 GiB). A kernel that is added removes those that were not used for longest.",
    )
    parser.add_argument("--clear", action="store_true", help="remove all kernels")
    parser.set_defaults(run=run)


def facts() -> dict[str, Any]:
    """Return the folder, its limit and what it holds; raise OSError or ValueError if none."""
    place, most, found = cache.folder(), cache.limit(), cache.entries()
    size = sum(entry.nbytes for entry in found)
    return {"folder": str(place), "limit_bytes": most, "files": len(found), "bytes": size}


def summary() -> str:
    """Describe the cache in a line."""
    try:
        place, most = cache.folder(), cache.limit()
    except (OSError, ValueError) as error:
        return f"none: {_trouble(error)}"
    found = cache.entries()
    return (
        f"{place}, {_files(found)} of at most {most / _MIB:,.0f} MiB "
        "(python -m tileattn cache; set TILEATTN_CACHE_DIR to change)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the cache, or clear it; return the exit status."""
    try:
        print(cleared() if arguments.clear else _report())
    except (OSError, ValueError) as error:
        print(f"no kernel cache: {_trouble(error)}", file=sys.stderr)
        return 2
    return 0


def cleared() -> str:
    """Clear the cache, and say what was removed."""
    place, removed = cache.folder(), cache.clear()
    kinds = [f"{name}: {_files(own)}" for name, own in _by_kind(removed) if own]
    return f"removed {_files(removed)} from {place}" + f" ({', '.join(kinds)})" * bool(kinds)


def _report() -> str:
    found, form = cache.entries(), "{:9} {:>7} {:>9}  {:16}  {}"
    lines = [
        f"folder    {cache.folder()} (set TILEATTN_CACHE_DIR to change)",
        f"limit     {cache.limit() / _MIB:,.1f} MiB (set TILEATTN_CACHE_BYTES to change)",
        "",
        form.format("kind", "files", "MiB", "oldest", "newest"),
    ]
    for name, own in (*_by_kind(found), ("all", found)):
        ends = [_minute(own[n].used) if own else "-" for n in (0, -1)]
        size = sum(entry.nbytes for entry in own) / _MIB
        lines.append(form.format(name, len(own), f"{size:,.1f}", *ends))
    return "\n".join(lines)


def _by_kind(found: Sequence[cache.Entry]) -> list[tuple[str, list[cache.Entry]]]:
    """Group entries by kind, in order; locks and partial files are others."""
    kinds = [entry.kind if entry.is_kernel else "" for entry in found]
    return [
        (name, [entry for entry, own in zip(found, kinds, strict=True) if own == kind])
        for kind, name in _KINDS.items()
    ]


def _files(found: Sequence[cache.Entry]) -> str:
    size = sum(entry.nbytes for entry in found) / _MIB
    return f"{len(found)} file{'s' * (len(found) != 1)}, {size:,.1f} MiB"


def _minute(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _trouble(error: Exception) -> str:
    remedy = "" if isinstance(error, ValueError) else "; set TILEATTN_CACHE_DIR to another folder"
    return f"{error}{remedy}"
