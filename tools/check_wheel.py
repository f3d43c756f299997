"""Check that a wheel holds every file of the package, and no compiled code."""

import sys
import zipfile
from pathlib import Path, PurePosixPath

COMPILED = {".a", ".dll", ".dylib", ".exe", ".lib", ".o", ".pyd", ".so"}
COMPILED |= {".cubin", ".fatbin", ".ptx"}
ROOT = Path(__file__).parents[1]
REQUIRED = {
    path.relative_to(ROOT).as_posix()
    for path in ROOT.glob("tileattn/**/*.*")
    if path.suffix != ".pyc"
}
"""The package as it lies here: a pattern of .gitignore would keep a folder out of the wheel."""


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
        found = problems(names, path)
        print("\n".join(found) if found else f"{path}: {len(names)} files, no compiled code")
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
