"""Say which results files are older than the code they speak of, by the history of git.

    python -m tools.stale_results                   all results files
    python -m tools.stale_results gpu_decode        the commits, and the changed files
    python -m tools.stale_results --check           exit status 1 if any file is older

A comment, a docstring or another file name is no change. Without the commit of a results file, as
in a shallow clone, the age is unknown, which is no failure. MkDocs calls `on_page_markdown`.
"""

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

CUDA, LLVM = "tileattn/kernels/cuda", "tileattn/kernels/llvm"
ON_GPU = tuple(
    f"{CUDA}/{name}" for name in ("src", "families", "plan", "tile_sizes.py", "tuning.py")
)
ON_CPU = (LLVM, "tileattn/backends/llvm", "tileattn/backends/numpy", "tileattn/algorithm")
LAUNCHES = (f"{CUDA}/jit", "tileattn/backends/cupy")
CALLS = ("tileattn/api.py", "tileattn/call", "tileattn/torch")  # CPU time counts, too
MORE = {
    **dict.fromkeys(("lived", "first_calls", "waits", "endurance", "end_to_end"), CALLS),
    **dict.fromkeys(("frameworks", "gpu_host"), CALLS),
    "distributed": ("tileattn/distributed",),
}
WITHOUT_CODE = ("gpu_ceilings",)  # cuBLAS and copies
SUFFIXES = (".py", ".cu", ".cuh")
MARK = re.compile(r"<!-- age: (\w+) -->")


class Age(NamedTuple):
    """A results file, and what changed since: None if the history does not say."""

    name: str
    machine: dict[str, Any]
    files: tuple[str, ...] | None
    commits: tuple[str, ...] = ()

    @property
    def is_stale(self) -> bool:
        return bool(self.files)

    @property
    def changed(self) -> str:
        """Say what changed since."""
        if self.files is None:
            return "unknown: its commit is not in the history"
        if not self.files:
            return "no"
        return f"{_count(self.files, 'source')} in {_count(self.commits, 'commit')}"


def _count(things: Sequence[str], name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def watched(name: str, machine: dict[str, Any]) -> tuple[str, ...]:
    """Return the code that a results file speaks of."""
    if name in WITHOUT_CODE:
        return ()
    more = next((paths for start, paths in MORE.items() if name.startswith(start)), ())
    if "gpu" not in machine:
        return ON_CPU + more
    return ON_GPU + more + (LAUNCHES if more is CALLS else ())


# --- what the code says ---------------------------------------------------------------------------


def essence(path: str, text: bytes) -> str:
    """Return the digest of a source without its comments and docstrings."""
    if path.endswith(".py"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and body and _is_docstring(body[0]):
                del body[0]
        said = ast.dump(tree).encode()
    else:
        said = b" ".join(re.sub(rb"//[^\n]*|/\*.*?\*/", b" ", text, flags=re.DOTALL).split())
    return hashlib.sha256(said).hexdigest()


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


# --- what git knows -------------------------------------------------------------------------------


class History:
    """The commits of a repository."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._essences: dict[str, str] = {}

    def _git(self, *words: str, given: bytes = b"") -> bytes:
        command = ["git", "-C", str(self._root), *words]
        return subprocess.run(command, input=given, capture_output=True, check=True).stdout

    def knows(self, commit: str) -> bool:
        """Return True if the repository has a commit."""
        try:
            self._git("cat-file", "-e", f"{commit}^{{commit}}")
        except (subprocess.CalledProcessError, FileNotFoundError):
            return False
        return True

    def sources(self, commit: str, paths: Sequence[str]) -> dict[str, str]:
        """Return the blobs of a commit's sources, by path."""
        if not paths:
            return {}
        lines = self._git("ls-tree", "-r", commit, "--", *paths).decode().splitlines()
        found = (line.split(maxsplit=3) for line in lines)
        return {path: blob for _, _, blob, path in found if path.endswith(SUFFIXES)}

    def essences(self, sources: dict[str, str]) -> dict[str, str]:
        """Return the digests of sources, by path."""
        new = {blob: path for path, blob in sources.items() if blob not in self._essences}
        held = self._git("cat-file", "--batch", given="\n".join([*new, ""]).encode())
        for blob, path in new.items():
            head, _, held = held.partition(b"\n")
            size = int(head.split()[-1])
            self._essences[blob] = essence(path, held[:size])
            held = held[size + 1 :]
        return {path: self._essences[blob] for path, blob in sources.items()}

    def changed(self, commit: str, paths: Sequence[str]) -> tuple[str, ...]:
        """Return the sources that say something else today, and those that went or came."""
        before, now = (self.sources(x, paths) for x in (commit, "HEAD"))
        same = before.keys() & {path for path in now if before.get(path) == now[path]}
        old, new = (
            self.essences({path: blob for path, blob in x.items() if path not in same})
            for x in (before, now)
        )
        moved = {*old.values()} & {*new.values()}
        files = (path for x in (old, new) for path, digest in x.items() if digest not in moved)
        return tuple(sorted(set(files)))

    def commits(self, commit: str, files: Sequence[str]) -> tuple[str, ...]:
        """Return the commits since that touched files, newest first."""
        if not files:
            return ()
        return tuple(
            self._git("log", "--format=%h %as %s", f"{commit}..HEAD", "--", *files)
            .decode()
            .splitlines()
        )


def ages(root: Path = ROOT, results: Path = RESULTS) -> Iterator[Age]:
    """Yield the age of each results file."""
    history = History(root)
    for path in sorted(results.glob("*.json")):
        machine = json.loads(path.read_text(encoding="utf-8"))["machine"]
        commit = machine.get("commit", "").removesuffix("-dirty")
        if not commit or not history.knows(commit):
            yield Age(path.stem, machine, None)
            continue
        files = history.changed(commit, watched(path.stem, machine))
        yield Age(path.stem, machine, files, history.commits(commit, files))


# --- output ---------------------------------------------------------------------------------------


def lines(found: Iterable[Age]) -> Iterator[str]:
    """Yield the lines of a table."""
    rows = [("file", "commit", "date", "measured on", "changed since")]
    for age in found:
        machine = age.machine
        where = machine.get("gpu") or machine.get("processor", "")
        rows.append((age.name, machine["commit"][:14], machine["date"], where, age.changed))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


@cache
def _of_the_site() -> dict[str, Age]:
    return {age.name: age for age in ages()}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Say below each table whether the code has changed since; MkDocs calls it by this name."""

    def said(match: re.Match[str]) -> str:
        age = _of_the_site().get(match[1])
        if age is None or not age.is_stale:
            return ""
        return f"**The code has changed since: {age.changed}.**"

    return MARK.sub(said, markdown).replace("<!-- ages -->", _summary(_of_the_site().values()))


def _summary(found: Iterable[Age]) -> str:
    """Name the stale files in a sentence; none if no history is known."""
    known = [age for age in found if age.files is not None]
    if not known:
        return ""
    old = [f"`{age.name}`" for age in known if age.is_stale]
    if not old:
        return "No results file is older than the code it speaks of."
    title = f"The code has changed since {len(old)} of {len(known)} results files were measured"
    return f'??? note "{title}"\n\n    {", ".join(old)}'


def main(argv: list[str] | None = None) -> int:
    """Print the ages; the exit status is 1 if a check finds a file that is older than the code."""
    parser = argparse.ArgumentParser(prog="stale_results", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="results files to explain")
    parser.add_argument("--check", action="store_true", help="exit status 1 if any is older")
    arguments = parser.parse_args(argv)
    found = [age for age in ages() if not arguments.names or age.name in arguments.names]
    for line in lines(found):
        print(line)
    if arguments.names:
        for age in found:
            print("", f"{age.name}:", *(age.files or ()), *age.commits, sep="\n  ")
    old = sum(age.is_stale for age in found)
    print(f"{old} of {len(found)} results files are older than the code they speak of")
    return int(bool(old) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
