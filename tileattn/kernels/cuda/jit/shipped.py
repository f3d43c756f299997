"""Machine code of common kernels that the wheel brings: their first calls compile nothing.

An architecture has two files. ``<arch>.bin`` holds the kernels, each compressed by LZMA.
``<arch>.json`` is their index: for the digest of what a kernel is made from (sources, options), its
place in the other file and the digest of its content. So edited sources find nothing here. A
checkout has no such files; ``tools/make_cubins.py`` makes them.
"""

import functools
import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "cubins"

Index = dict[str, tuple[int, int, str]]
"""Start and bytes of each kernel in the file, and the digest of its content."""


def read(arch: str, inputs: str, folder: Path | None = None) -> bytes | None:
    """Return the content for a digest of inputs; None if it is not shipped, or damaged."""
    folder = FOLDER if folder is None else folder
    found = index(folder, arch).get(inputs)
    if found is None:
        return None
    import lzma  # after this point a call needs it

    start, nbytes, digest = found
    archive = folder / f"{arch}.bin"
    try:
        with archive.open("rb") as file:
            file.seek(start)
            body = lzma.decompress(file.read(nbytes))
    except (OSError, lzma.LZMAError):
        body = b""
    if hashlib.sha256(body).hexdigest() != digest:
        _warn_once(f"{archive} is damaged: its kernels are compiled; reinstall tileattn")
        return None
    return body


@functools.cache
def index(folder: Path, arch: str) -> Index:
    """Read the index of an architecture; it is empty without one, or with a damaged one."""
    place = folder / f"{arch}.json"
    try:
        found: Index = json.loads(place.read_bytes())["kernels"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        _warn_once(f"{place} is damaged: kernels are compiled; reinstall tileattn")
        return {}
    return found


def write(folder: Path, arch: str, compiler: str, kernels: Mapping[str, bytes]) -> int:
    """Write the files of an architecture, given contents by digest; return their bytes."""
    import lzma

    folder.mkdir(exist_ok=True)
    places: Index = {}
    with (folder / f"{arch}.bin").open("wb") as file:
        for inputs, body in sorted(kernels.items()):
            start, packed = file.tell(), lzma.compress(body)
            file.write(packed)
            places[inputs] = start, len(packed), hashlib.sha256(body).hexdigest()
        size = file.tell()
    text = json.dumps({"compiler": compiler, "kernels": places}, separators=(",\n", ":"))
    return size + (folder / f"{arch}.json").write_text(text + "\n", encoding="utf-8")


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)
