"""Install each archive into an environment of its own, and let the package check itself there."""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path


def checked(archive: Path, folder: Path) -> int:
    """Install an archive in a folder; the exit status is that of the first step that fails."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    # Neither the checkout nor another environment may stand in for what was installed.
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}
    steps = (
        ["pip", "install", "--quiet", "--disable-pip-version-check", str(archive.resolve())],
        ["tileattn", "info"],
        ["tileattn", "check", "--problems", "20"],
    )
    for step in steps:
        status = subprocess.run([python, "-m", *step], cwd=folder, env=environment, check=False)
        if status.returncode:
            print(f"{archive}: `python -m {' '.join(step)}` ended with status {status.returncode}")
            return status.returncode
    print(f"{archive}: installs, and agrees with the oracle")
    return 0


def main(paths: list[str]) -> int:
    """Check each archive; the exit status is 1 where one has a fault."""
    if not paths:
        print("usage: check_install.py ARCHIVE...")
        return 2
    failed = False
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            failed |= bool(checked(Path(path), Path(folder, "environment")))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
