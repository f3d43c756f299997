"""Install each archive into an environment of its own, and let the package check itself there."""

import os
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def checked(archive: Path, folder: Path) -> int:
    """Install an archive in a folder; the exit status is that of the first step that fails."""
    venv.create(folder)
    python = str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")
    # Neither the checkout nor another environment may stand in for what was installed.
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    steps = (
        [*pip, "install", "--quiet", str(archive.resolve())],
        [python, "-m", "tileattn", "info"],
        [python, "-m", "tileattn", "check", "--problems", "20"],
    )
    for step in steps:
        status = subprocess.run(step, cwd=folder, env=environment, check=False)
        if status.returncode:
            print(f"{archive}: `{' '.join(step)}` ended with status {status.returncode}")
            return status.returncode
    print(f"{archive}: installs, and agrees with the oracle")
    return 0


def main(paths: list[str]) -> int:
    """Check each archive; the exit status is 1 where one has a fault."""
    if not paths:
        print("usage: check_install.py ARCHIVE...")
        return 2
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        folders = (Path(folder, str(n)) for n in range(len(paths)))
        return int(any(list(pool.map(checked, map(Path, paths), folders))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
