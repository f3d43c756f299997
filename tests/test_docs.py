"""What the pages say is run: every block marked ``python`` in README.md and docs/."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block marked `py` is shown in the same colours and not run (it needs a GPU, or is a fragment).
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code_of(page: Path) -> str:
    """Blocks of one page as one program, each on the line where it stands in the page."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        start = text.count("\n", 0, block.start(1))
        body = block.group(1).splitlines()
        lines[start : start + len(body)] = body
    return "\n".join(lines)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if BLOCK.search(page.read_text("utf-8"))],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
@pytest.mark.filterwarnings("error")
def test_the_code_of_a_page_runs(
    page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code_of(page), page, "exec"), {"__name__": "__page__"})


def test_links_between_files_lead_somewhere() -> None:
    link = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)[)#]")  # no lambda in C++
    broken = [
        f"{page.relative_to(ROOT).as_posix()}: {target}"
        for page in PAGES
        for target in link.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == []
