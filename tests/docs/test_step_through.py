"""The debugger session of the page is what the debugger prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import tileattn

ROOT = Path(tileattn.__file__).parents[1]
PAGE = (ROOT / "docs" / "step-through.md").read_text(encoding="utf-8")
SESSION = re.compile(r"<!-- session: (\S+) -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_session_of_the_page() -> None:
    (program,) = {path for path, _ in SESSION.findall(PAGE)}
    shown = "".join(text for _, text in SESSION.findall(PAGE))
    commands = re.findall(r"^\(Pdb\) (.*\n)", shown, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input="".join(commands),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    # The page leaves out where the program stops at first, the breakpoint, folders and numbers.
    _, *printed = done.stdout.split("(Pdb) ")
    session = "".join(f"(Pdb) {c}{out}" for c, out in zip(commands, printed, strict=True))
    session = re.sub(r"^(Breakpoint|Disabled breakpoint) .*\n", "", session, flags=re.MULTILINE)
    session = re.sub(r"> \S*?(\w+\.py)\(\d+\)(\w+)\(\)(->None)?", r"> \1 \2()", session)
    assert session == shown
