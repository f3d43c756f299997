"""The code of the pages is run: blocks marked ``python``, and ``pycon`` with what it prints."""

import doctest
import json
import re
import shlex
from pathlib import Path
from statistics import geometric_mean
from textwrap import dedent

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

import tileattn
from benchmarks import gpu
from tileattn.call import hints
from tileattn.cli.commands import main, parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block marked `py` is shown in the same colours and not run (it needs a GPU, or is a fragment).
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^( *)```pycon\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```console\n\$ tileattn (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
# What pages need that no extra for development brings.
LIBRARIES = {"transformers": "transformers"}
# Pages whose code loads a framework and compiles with it: tens of seconds.
FRAMEWORKS = {"README", "index", "jax", "pytorch", "second-derivatives", "transformers"}
WITH_EXAMPLES = [name for name, text in TEXTS.items() if EXAMPLE.search(text)]


def parameters(names: list[str]) -> list[ParameterSet]:
    """Return pages as parameters of a test; those with a framework are slow."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (Path(name).stem in FRAMEWORKS))
        for name in names
    ]


def code_of(text: str) -> str:
    """Blocks of one page as one program, each on the line where it stands in the page."""
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        start = text.count("\n", 0, block.start(1))
        body = block.group(1).splitlines()
        lines[start : start + len(body)] = body
    return "\n".join(lines)


@pytest.mark.parametrize(
    "name", parameters([name for name, text in TEXTS.items() if BLOCK.search(text)])
)
@pytest.mark.filterwarnings("error")
def test_the_code_of_a_page_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if (stem := Path(name).stem) in LIBRARIES:
        pytest.importorskip(LIBRARIES[stem])
    monkeypatch.chdir(tmp_path)
    exec(compile(code_of(TEXTS[name]), name, "exec"), {"__name__": "__page__"})


def failures_of(name: str, text: str) -> str:
    """Run the examples of a page, one after another with the same names; report what differs."""
    source = "\n".join(dedent(example) for _, example in EXAMPLE.findall(text))
    example = doctest.DocTestParser().get_doctest(source, {}, name, name, 0)
    report: list[str] = []
    with np.printoptions():  # a page may set its own
        doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(
            example, out=report.append
        )
    return "".join(report)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", parameters(WITH_EXAMPLES))
def test_the_examples_of_a_page_print_what_it_says(name: str) -> None:
    assert failures_of(name, TEXTS[name]) == ""


def test_commands_print_what_the_page_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = COMMAND.findall(TEXTS["docs/reference/command-line.md"])
    assert len(shown) > 1
    for command, printed in shown:
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == printed


def test_no_example_is_missed() -> None:
    assert {"docs/io.md", "docs/numerics.md", "docs/tutorial.md"} <= set(WITH_EXAMPLES)
    assert [name for name, text in TEXTS.items() if ">>>" in EXAMPLE.sub("", text)] == []


def test_links_between_files_lead_somewhere() -> None:
    link = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)[)#]")  # no lambda in C++
    broken = [
        f"{page.relative_to(ROOT).as_posix()}: {target}"
        for page in PAGES
        for target in link.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_speeds_are_those_of_the_results(name: str) -> None:
    text = " ".join(TEXTS[name].split())
    counts = []
    for kind in ("forward", "backward"):
        results = ROOT / "benchmarks" / "results" / f"gpu_{kind}_bf16.json"
        rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
        certain = [row for row in rows if max(row["spread"].values()) <= 0.1]
        speedups = [speedup for speedup in map(gpu.best, certain) if speedup is not None]
        assert f"the {kind} pass at {geometric_mean(speedups):.2f} times" in text
        counts.append(str(len(speedups)))
    assert f"geometric means of {' and '.join(counts)} configurations" in text


def test_the_fractions_of_linear_scaling_are_those_of_the_results() -> None:
    results = ROOT / "benchmarks" / "results" / "distributed_cpu.json"
    uneven: list[float] = []
    even: list[float] = []
    for row in json.loads(results.read_text(encoding="utf-8"))["rows"]:
        if row["causal"] and row["N"] == 16384 and row["schedule"] in {"ring", "heads"}:
            is_uneven = (row["schedule"], row["layout"]) == ("ring", "contiguous")
            (uneven if is_uneven else even).append(row["fraction_of_linear"])
    assert "contiguous parts reaches less than two thirds of" in TEXTS["docs/distributed.md"]
    assert max(uneven) < 2 / 3
    assert "parts and heads reach about\nnine tenths" in TEXTS["docs/distributed.md"]
    assert 0.85 < min(even) < max(even) < 1


def test_every_name_that_messages_know_is_explained() -> None:
    there = re.findall(r"^\| (.*?) \|", TEXTS["docs/migration.md"], re.MULTILINE)
    named = set(re.findall(r"\w+", " ".join(there)))
    assert set(hints.ALIASES) <= named


def test_every_public_name_is_in_the_reference() -> None:
    listed = set(re.findall(r"^::: tileattn\.(\w+)$", "\n".join(TEXTS.values()), re.MULTILINE))
    assert set(tileattn.__all__) - {"__version__"} <= listed


def test_every_command_and_environment_variable_is_listed() -> None:
    page = TEXTS["docs/reference/command-line.md"]
    sources = "\n".join(x.read_text("utf-8") for x in (ROOT / "tileattn").rglob("*.py"))
    variables = set(re.findall(r'"(TILEATTN_[A-Z_]+)"', sources))
    assert len(variables) > 3
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    commands = set(re.findall(r"^    (\w+) ", parser().format_help(), re.MULTILINE))
    assert len(commands) > 3
    assert variables | commands <= listed
