"""The built site: what a reader's browser shows."""

import html
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="it builds the pages: pip install mkdocs-material")

ROOT = Path(__file__).parents[2]
INCLUDE = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
PAGES = {page: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))}
INCLUDED = [(page.stem, path) for page, text in PAGES.items() for path in INCLUDE.findall(text)]
SOURCES = [
    ROOT / "README.md",
    *PAGES,
    *(path for room in ("tileattn", "examples", "tools") for path in (ROOT / room).rglob("*.py")),
]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, once for all tests of this process."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


def text_of(page: Path) -> str:
    """Read the text of a built page, without its tags."""
    return html.unescape(re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8")))


@pytest.mark.slow
def test_every_included_file_is_on_its_page(site: Path) -> None:
    assert {f"examples/recipes/{path.name}" for path in ROOT.glob("examples/recipes/*.py")} < {
        path for _, path in INCLUDED
    }
    shown = {stem: text_of(site / stem / "index.html") for stem, _ in INCLUDED}
    programs = [(stem, path) for stem, path in INCLUDED if path.endswith(".py")]
    assert [
        (stem, path)
        for stem, path in programs
        if (ROOT / path).read_text(encoding="utf-8").strip() not in shown[stem]
    ] == []


@pytest.mark.slow
def test_no_page_shows_the_mark_of_an_include(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) >= len(PAGES)
    assert [page for page in pages if re.search(r"--8\s?<", text_of(page))] == []


def test_install_commands_name_what_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    wrong = []
    for path in SOURCES:
        for line in re.findall(r"pip install .*", path.read_text(encoding="utf-8")):
            named = re.findall(r"\.\[([\w,]+)\]", line)
            unknown = set(",".join(named).split(",")) - extras - {""}
            # The package is on no index: an install command names a checkout.
            if unknown or re.search(r"(?<![-\w])tileattn\b", line):
                wrong.append((path.name, line))
    assert wrong == []
