"""Check the docstring of every public function, class and property against numpydoc's rules.

What the package exports is held to all the rules that pyproject.toml names. Inside the package one
sentence is enough, or none where the name says it; sections are held to the same rules.
"""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType

import tileattn

ROOT = Path(__file__).parents[1]
NOT_NEEDED_INSIDE = {"GL08", "PR01", "RT01"}  # a docstring; its parameters and return value


def exported(module: ModuleType) -> Iterator[str]:
    """Full names of the functions and classes that ``__all__`` reaches, through modules too."""
    for value in (getattr(module, name) for name in module.__all__):
        if inspect.ismodule(value):
            yield from exported(value)
        elif callable(value):
            yield f"{value.__module__}.{value.__qualname__}"


def members(owner: ModuleType | type, name: str) -> Iterator[tuple[str, object]]:
    """Dotted names and values of the public objects defined in a module or class, and deeper."""
    home = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
    for inner, value in vars(owner).items():
        defined_here = callable(value) and getattr(value, "__module__", None) == home
        descriptor = isinstance(value, property | cached_property | classmethod | staticmethod)
        if not inner.startswith("_") and (defined_here or descriptor):
            yield f"{name}.{inner}", value
            if isinstance(value, type):
                yield from members(value, f"{name}.{inner}")


def modules() -> Iterator[ModuleType]:
    yield tileattn
    for found in pkgutil.walk_packages(tileattn.__path__, "tileattn."):
        yield importlib.import_module(found.name)


def exempt(value: object, *, public: bool) -> set[str]:
    """Name the rules that an object need not follow."""
    ignored = set() if public else NOT_NEEDED_INSIDE
    if inspect.isfunction(value):
        kinds = {parameter.kind for parameter in inspect.signature(value).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            ignored = ignored | {"PR02"}  # the docstring lists the names that ``**options`` takes
    return ignored


def main() -> int:
    """Print every fault; the exit status is 1 where there is one."""
    # Tests of this module are collected on GPU machines, too, which need not have numpydoc.
    from numpydoc.hooks.validate_docstrings import parse_config
    from numpydoc.validate import validate

    rules = parse_config(ROOT)["checks"]
    public = set(exported(tileattn))
    faults: list[str] = []
    count = 0
    for module in modules():
        for name, value in members(module, module.__name__):
            outside = name in public or name.rpartition(".")[0] in public
            report = validate(name)
            count += 1
            faults += [
                f"{report['file']}:{report['file_line']}: {name}: {code} {text}"
                for code, text in report["errors"]
                if code in rules - exempt(value, public=outside)
            ]
    print("\n".join(faults) if faults else f"{count} docstrings follow numpydoc's rules")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
