"""Install each archive into an environment of its own, and let the package check itself there.

python tools/check_install.py dist/*                                  on this Python
python tools/check_install.py dist/* --python python3.11 python3.13   on each of these
python tools/check_install.py dist/* --oldest                         with the oldest libraries
python tools/check_install.py --pins cpu torch      print the oldest versions that extras accept
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count, product
from pathlib import Path

ROOT = Path(__file__).parents[1]
_AT_LEAST = re.compile(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)")


def oldest(requirements: Iterable[str]) -> list[str]:
    """Return a pin to the oldest version that each requirement accepts."""
    found = map(_AT_LEAST.match, requirements)
    return [f"{x[1]}=={x[2]}" for x in found if x]


def oldest_libraries(extras: Iterable[str]) -> list[str]:
    """Return the pins of what extras install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = (x for extra in extras for x in project["optional-dependencies"][extra])
    return oldest([*project["dependencies"], *optional])


def checked(archive: Path, base: str, pins: list[str], folder: Path) -> int:
    """Install an archive in a folder; the exit status is that of the first step that fails."""
    python = str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")
    # Neither the checkout nor another environment may stand in for what was installed.
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    install, check = [*pip, "install", "--quiet", *pins], [python, "-m", "tileattn", "check"]
    steps = (
        [base, "-m", "venv", "--without-pip", str(folder)],
        [*install, str(archive.resolve())],
        [python, "-m", "tileattn", "info"],
        [*check, "--problems", "20", "--backend", "numpy"],
        [*install, f"{archive.resolve()}[cpu]"],
        [*check, "--problems", "5", "--backend", "llvm"],
    )
    for step in steps:
        status = subprocess.run(step, cwd=folder.parent, env=environment, check=False).returncode
        if status:
            print(f"{archive}: `{' '.join(step)}` ended with status {status}")
            return status
    print(f"{archive}: installs on {base}, and agrees with the oracle")
    return 0


def main() -> int:
    """Check each archive on each Python; the exit status is 1 if one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("archives", nargs="*", type=Path, metavar="ARCHIVE", help="wheels and source archives")
    add("--python", nargs="+", default=[sys.executable], help="interpreters (default: this one)")
    add("--oldest", action="store_true", help="with the oldest versions of the libraries")
    add("--pins", nargs="+", metavar="EXTRA", help="print the oldest versions, and check nothing")
    arguments = parser.parse_args()
    if arguments.pins:
        print(*oldest_libraries(arguments.pins))
        return 0
    pins = oldest_libraries(["cpu"]) if arguments.oldest else []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = product(arguments.archives, arguments.python)
        done = [
            pool.submit(checked, archive, python, pins, Path(folder, str(n)))
            for n, (archive, python) in zip(count(), jobs)
        ]
        return int(any(job.result() for job in done))


if __name__ == "__main__":
    sys.exit(main())
