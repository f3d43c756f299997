"""A results file is stale if its code says something else today, and only then."""

import json
import subprocess
from pathlib import Path

import pytest

from tools import stale_results
from tools.pages import ROOT
from tools.stale_results import ages, watched

KERNEL, PLAN = "tileattn/kernels/cuda/src/forward.cu", "tileattn/kernels/cuda/plan/grid.py"
CALL, BRIDGE = "tileattn/call/parse.py", "tileattn/torch/bridge.py"
SOURCES = {
    KERNEL: "int x = 1;  // one\n",
    PLAN: 'def grid():\n    """Return a grid."""\n    return 1\n',
    CALL: "a = 1\n",
    BRIDGE: "b = 1\n",
}
NAMES = ("gpu_models", "lived_gpu", "gpu_ceilings")


class Repository:
    """A repository with results files, measured at its first commit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.results = root / "results"
        self.git("init", "--quiet")
        self.commit(**SOURCES)
        first = self.git("rev-parse", "--short", "HEAD").strip()
        self.results.mkdir()
        for name in NAMES:
            machine = {"gpu": "A GPU", "commit": first, "date": "2026-01-02"}
            text = json.dumps({"machine": machine, "rows": []})
            (self.results / f"{name}.json").write_text(text, encoding="utf-8")

    def git(self, *words: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(self.root), *own, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def commit(self, **sources: str) -> None:
        for path, text in sources.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text, encoding="utf-8")
        self.git("add", "--all")
        self.git("commit", "--quiet", "-m", f"Change {' '.join(sources)}")

    def stale(self) -> list[str]:
        return [age.name for age in ages(self.root, self.results) if age.is_stale]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_comments_and_names_of_files_are_no_change(repository: Repository) -> None:
    assert repository.stale() == []
    repository.commit(
        **{KERNEL: "int x =\n  1; /* two */\n", PLAN: "def grid():  # now\n    return 1\n"}
    )
    repository.git("mv", KERNEL, KERNEL.replace("forward", "onward"))
    repository.git("commit", "--quiet", "-m", "Rename")
    assert repository.stale() == []


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        (KERNEL, "int x = 2;", ["gpu_models", "lived_gpu"]),
        (PLAN, "def grid():\n    return 2\n", ["gpu_models", "lived_gpu"]),
        (CALL, "a = 2\n", ["lived_gpu"]),
        (BRIDGE, "b = 2\n", ["lived_gpu"]),
        ("tileattn/kernels/cuda/src/new.cuh", "int y;", ["gpu_models", "lived_gpu"]),
        ("tileattn/jax/bridge.py", "c = 1\n", []),
    ],
)
def test_a_change_makes_what_it_concerns_stale(
    repository: Repository, path: str, text: str, expected: list[str]
) -> None:
    repository.commit(**{path: text})
    assert repository.stale() == sorted(expected)
    for age in ages(repository.root, repository.results):
        if age.is_stale:
            assert age.files == (path,)
            assert [line.partition(" Change ")[2] for line in age.commits] == [path]


def test_a_change_that_is_taken_back_is_none(repository: Repository) -> None:
    repository.commit(**{KERNEL: "int x = 2;"})
    repository.commit(**{KERNEL: SOURCES[KERNEL]})
    assert repository.stale() == []


def test_without_history_the_age_is_unknown(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").rename(tmp_path / "gone")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = list(ages(tmp_path, repository.results))
    assert [age.files for age in found] == [None] * len(NAMES)
    assert "unknown" in "\n".join(stale_results.lines(found))
    monkeypatch.setattr(stale_results, "ages", lambda: found)
    assert stale_results.main(["--check"]) == 0


def test_the_check_and_the_site_say_what_is_stale(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.commit(**{KERNEL: "int x = 2;"})
    found = list(ages(repository.root, repository.results))
    monkeypatch.setattr(stale_results, "ages", lambda: found)
    monkeypatch.setattr(stale_results, "_of_the_site", lambda: {age.name: age for age in found})
    assert stale_results.main(["--check"]) == 1
    assert capsys.readouterr().out.endswith(
        "2 of 3 results files are older than the code they speak of\n"
    )
    page = "Measured. <!-- age: gpu_models -->\nThen. <!-- age: gpu_ceilings -->\n\n<!-- ages -->"
    assert stale_results.on_page_markdown(page) == (
        "Measured. **The code has changed since: 1 source in 1 commit.**\nThen. \n\n"
        '??? note "The code has changed since 2 of 3 results files were measured"\n\n'
        "    `gpu_models`, `lived_gpu`"
    )


@pytest.mark.parametrize("machine", [{"gpu": "A GPU"}, {"processor": "A CPU"}])
@pytest.mark.parametrize("name", ["gpu_models", "lived_gpu", "frameworks_amd", "distributed_gpu"])
def test_the_watched_code_exists(name: str, machine: dict[str, str]) -> None:
    paths = watched(name, machine)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
