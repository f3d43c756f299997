"""What `import tileattn` does: it loads no heavy library, writes nothing, and is quick."""

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.test_architecture import LAZY, ROOT


def run_python(code: str, cwd: Path) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    command = [sys.executable, "-c", path + textwrap.dedent(code)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_loads_without_a_heavy_library(tmp_path: Path) -> None:
    loaded = run_python(
        """
        import sys
        from tileattn import *
        print(*{name.split(".")[0] for name in sys.modules})
        """,
        tmp_path,
    )
    assert "tileattn" in loaded.split()
    assert (LAZY | {"llvmlite"}).isdisjoint(loaded.split())


def test_import_writes_nothing_and_starts_nothing(tmp_path: Path) -> None:
    """The interpreter's own audit events see every file, thread, process and connection."""
    events = run_python(
        """
        import os, sys
        sys.dont_write_bytecode = True
        WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        ACTS = {"os.fork", "os.mkdir", "os.posix_spawn", "os.remove", "os.rename", "os.system",
                "socket.connect", "subprocess.Popen", "_thread.start_joinable_thread",
                "_thread.start_new_thread"}
        seen = []
        import numpy, ml_dtypes, threadpoolctl
        def watch(event, arguments):
            if event in ACTS or (event == "open" and arguments[2] & WRITES):
                seen.append(f"{event} {arguments[0]}")
        sys.addaudithook(watch)
        open(os.devnull, "w").close()
        control, seen[:] = len(seen), []
        import tileattn
        print(control, *seen, sep="\\n")
        """,
        tmp_path,
    )
    assert events.split("\n")[0] == "1", "the audit hook missed a file opened for writing"
    assert events.split("\n")[1:] == [""]
    assert list(tmp_path.iterdir()) == []


def seconds_to_import(module: str, cwd: Path) -> float:
    code = f"""
        import time
        start = time.process_time()
        import {module}
        print(time.process_time() - start)
        """
    return float(run_python(code, cwd))


def test_import_is_quick(tmp_path: Path) -> None:
    """Under 0.2 s; on a machine where NumPy alone is slow, at most 0.1 s more than NumPy.

    Processor time, and the smallest of several runs, since a busy machine only ever adds to it.
    """
    whole = numpy_alone = float("inf")
    for _ in range(6):
        whole = min(whole, seconds_to_import("tileattn", tmp_path))
        if whole < 0.2:
            break
        numpy_alone = min(numpy_alone, seconds_to_import("numpy", tmp_path))
    assert whole < 0.2 or whole - numpy_alone < 0.1
