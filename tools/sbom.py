"""Write what an installation of tileattn brings along, with licences, as CycloneDX JSON.

    python -m tools.sbom cpu torch > sbom.json    with the extras cpu and torch, as installed here

Versions and licences are those of the distributions in this environment. The exit status is 1 if a
distribution is not installed, or states no licence.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LONGEST = 60  # characters of a licence's name; a longer field has its whole text


def requirements(name: str, extras: Sequence[str]) -> Iterator[Requirement]:
    """Yield the direct requirements of a distribution that hold on this machine."""
    for text in metadata.requires(name) or []:
        found = Requirement(text)
        holds = found.marker is None or any(
            found.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        if holds:
            yield found


def closure(name: str, extras: Sequence[str]) -> dict[str, set[str]]:
    """Return each distribution that is needed, with the extras that are asked of it."""
    found: dict[str, set[str]] = {}
    waiting = [(canonicalize_name(name), set(extras))]
    while waiting:
        name, asked = waiting.pop()
        if name in found and asked <= found[name]:
            continue
        found.setdefault(name, set()).update(asked)
        needed = requirements(name, sorted(found[name]))
        waiting += [(canonicalize_name(x.name), set(x.extras)) for x in needed]
    return found


def licence(about: metadata.PackageMetadata) -> str | None:
    """Return the licence that a distribution states; a whole text in its place does not count."""
    classifiers = about.get_all("Classifier") or []
    classified = (x.rpartition(" :: ")[2] for x in classifiers if x.startswith("License ::"))
    expression, text = (
        (about.get_all(field) or [""])[0] for field in ("License-Expression", "License")
    )
    return expression or (text if len(text) <= LONGEST else "") or next(classified, None)


def component(name: str) -> dict[str, Any]:
    """Describe a distribution."""
    about = metadata.metadata(name)
    version, stated = about["Version"], licence(about)
    return {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": [{"license": {"name": stated}}] if stated else [],
    }


def bill(extras: Sequence[str]) -> dict[str, Any]:
    """Return the bill of materials of an installation with these extras."""
    needed = closure("tileattn", extras)
    own = component("tileattn")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": [component(name) for name in sorted(needed) if name != "tileattn"],
        "dependencies": [
            {
                "ref": name,
                "dependsOn": sorted(
                    {canonicalize_name(x.name) for x in requirements(name, sorted(asked))} - {name}
                ),
            }
            for name, asked in sorted(needed.items())
        ],
    }


def main(extras: list[str]) -> int:
    """Print the bill of materials; return the exit status."""
    try:
        found = bill(extras)
    except metadata.PackageNotFoundError as error:
        print(f"not installed: {error.name}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2))
    silent = [x["name"] for x in found["components"] if not x["licenses"]]
    if silent:
        print(f"no licence stated: {', '.join(silent)}", file=sys.stderr)
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
