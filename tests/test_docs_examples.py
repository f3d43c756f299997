"""What the pages say Python prints is what it prints: every block marked ``pycon`` in docs/."""

import doctest
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").rglob("*.md"))
}
PAGES_WITH_EXAMPLES = {name: text for name, text in PAGES.items() if EXAMPLE.search(text)}


def failures_of(name: str, text: str) -> str:
    """Run the examples of one page, one after another with the same names; report what differs."""
    source = "\n".join(EXAMPLE.findall(text))
    example = doctest.DocTestParser().get_doctest(source, {}, name, name, 0)
    report: list[str] = []
    with np.printoptions():  # a page may set its own
        doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    return "".join(report)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", PAGES_WITH_EXAMPLES)
def test_the_examples_of_a_page_print_what_it_says(name: str) -> None:
    assert failures_of(name, PAGES_WITH_EXAMPLES[name]) == ""


def test_the_pages_with_examples_are_known() -> None:
    assert set(PAGES_WITH_EXAMPLES) == {"docs/io.md", "docs/numerics.md", "docs/tutorial.md"}


@pytest.mark.parametrize("name", PAGES)
def test_every_prompt_stands_in_a_example(name: str) -> None:
    assert ">>>" not in EXAMPLE.sub("", PAGES[name])


def test_a_wrong_output_is_reported() -> None:
    page = "text\n\n```pycon\n>>> x = 2\n```\n\ntext\n\n```pycon\n>>> x + 2\n5\n```\n"
    assert "Expected:\n    5\nGot:\n    4" in failures_of("page", page)
    assert failures_of("page", page.replace("5", "4")) == ""
