"""What the commands share: types of arguments, and how a command ends."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import Any

from tileattn.backends import registry

REFUSED = 2
"""Exit status of a command that did nothing, as argparse's own."""

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the number of the signal."""


def refused(message: object) -> int:
    """Print why nothing was done; return the exit status."""
    print(message, file=sys.stderr)
    return REFUSED


def number(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    """Return a type for argparse: a finite number of at least ``least``."""
    what = f"a{' whole' if kind is int else ''} number"
    what = f"{what} of at least {least}" if least > -math.inf else f"a finite{what[1:]}"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be {what}; got {text!r}")
        return value

    return read


SIZE, COUNT, SECONDS = number(int, 0), number(int, 1), number(float, 0)
REAL, INTEGER = number(float, -math.inf), number(int, -math.inf)


def integers(text: str) -> tuple[int, ...]:
    """Read integers separated by commas."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        message = f"must be whole numbers separated by commas; got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def add_backend(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--backend``."""
    parser.add_argument(
        "--backend",
        default="auto",
        metavar="NAME",
        help=f"{what}: a name, or MODULE:CLASS, which is imported and registered (default auto)",
    )


def backend_named(text: str) -> str:
    """Return the name of a backend; import and register one that is given as MODULE:CLASS."""
    name = registry.load(text).name if ":" in text else text
    registry.check_name(name)
    return name


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs to read")


def print_json(found: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(found, indent=2))
