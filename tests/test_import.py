"""`import tileattn` loads no heavy library, writes nothing, and starts nothing."""

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


def test_import_loads_neither_backends_nor_other_libraries(tmp_path: Path) -> None:
    code = "import ml_dtypes, numpy, sys, threadpoolctl; before = {*sys.modules}; import tileattn;"
    loaded = run_python(code + "print(*{*sys.modules} - before)", tmp_path).split()
    assert {x.split(".")[0] for x in loaded} <= sys.stdlib_module_names | {"numpy", "tileattn"}
    rooms = ("backends.cupy", "backends.llvm", "backends.numpy", "kernels", "testing", "oracle")
    assert [x for x in loaded if x.startswith(tuple(f"tileattn.{room}" for room in rooms))] == []
