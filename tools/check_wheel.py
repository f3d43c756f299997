"""Check that a wheel holds every file of the package, and no compiled code but undamaged cubins."""

import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath

from tileattn.kernels.cuda.jit import shipped

COMPILED = {".a", ".dll", ".dylib", ".exe", ".lib", ".o", ".pyd", ".so"}
COMPILED |= {".cubin", ".fatbin", ".ptx"}
ROOT = Path(__file__).parents[1]
REQUIRED = {
    path.relative_to(ROOT).as_posix()
    for path in ROOT.glob("tileattn/**/*.*")
    if path.suffix != ".pyc"
}
"""The package as it lies here: a pattern of .gitignore would keep a folder out of the wheel."""

CUBINS = "tileattn/kernels/cuda/cubins/"
MOST_BYTES = 30_000_000  # of all cubins


def cubins(archive: zipfile.ZipFile) -> tuple[int, list[str]]:
    """Count the kernels that a wheel brings, and list what is wrong with them."""
    names = [name for name in archive.namelist() if name.startswith(CUBINS)]
    count, size = 0, sum(archive.getinfo(name).file_size for name in names)
    found = [f"{CUBINS}: {size:,} bytes; at most {MOST_BYTES:,}"] if size > MOST_BYTES else []
    with tempfile.TemporaryDirectory() as place:
        archive.extractall(place, names)
        for arch in (PurePosixPath(name).stem for name in names if name.endswith(".json")):
            kernels = shipped.index(Path(place, CUBINS), arch)
            damaged = [x for x in kernels if not shipped.read(arch, x, Path(place, CUBINS))]
            found += [f"{CUBINS}{arch}.bin: kernel {x} is damaged" for x in damaged]
            count += len(kernels)
    return count, found


def problems(names: list[str], wheel: str) -> list[str]:
    found = [f"{name}: compiled code" for name in names if PurePosixPath(name).suffix in COMPILED]
    found += [f"{name}: missing" for name in sorted(REQUIRED.difference(names))]
    found += [
        f"{name}: outside the package"
        for name in names
        if not name.startswith("tileattn/") and ".dist-info/" not in name
    ]
    if not wheel.endswith("-py3-none-any.whl"):
        found.append(f"{wheel}: the tag is not py3-none-any")
    return found


def main(paths: list[str]) -> int:
    """Report on each wheel; the exit status is 1 where one has a fault."""
    if not paths:
        print("usage: check_wheel.py WHEEL...")
        return 2
    status = 0
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            count, damage = cubins(archive)
        found = problems(names, path) + damage
        said = f"{path}: {len(names)} files, {count} compiled kernels"
        print("\n".join(found) if found else said)
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
