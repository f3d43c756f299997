"""`tools/release.py` and `tools/sbom.py`: checks, placeholders, and the bill of materials."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import tileattn
from tools import check_install, release, sbom

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CITATION = (ROOT / "CITATION.cff").read_text("utf-8")


def test_this_version_has_its_section_and_its_citation() -> None:
    sections = (ROOT / "CHANGELOG.md").read_text("utf-8").split("\n## ")
    assert sections[1].startswith("Unreleased\n")
    sections[1] = "Unreleased\n"
    assert release.faults(tileattn.__version__, "\n## ".join(sections), CITATION) == []


@pytest.mark.parametrize(
    ("version", "changelog", "said"),
    [
        ("1.2.0", "## Unreleased\n\n### Added\n\n## 1.2.0 - 2026-01-31\n", "and empty"),
        ("1.2.0", "## 1.2.0 - 2026-01-31\n\n## 1.1.0 - 2026-01-30\n", "`Unreleased`"),
        ("1.2.0", "## Unreleased\n\n## 1.2.0\n", "must be `1.2.0 - DATE`"),
        ("1.2.0", "## Unreleased\n\n## 1.2.0 - 2026-01-31\n", "must be 1.2.0"),
    ],
)
def test_a_release_with_the_wrong_version(version: str, changelog: str, said: str) -> None:
    assert any(said in x for x in release.faults(version, changelog, CITATION))


def test_links_of_the_readme_work_elsewhere() -> None:
    page = release.absolute((ROOT / "README.md").read_text("utf-8"), "https://host/us", "v1")
    links = re.findall(r'\]\(([^)]*)\)|(?:src|srcset)="([^"]*)"', page)
    assert len(links) > 20
    for link in map("".join, links):
        assert re.match("https?:", link), link
        found = re.match("https://host/us/(?:blob|raw)/v1/([^#]*)", link)
        assert found is None or (ROOT / found[1]).is_file()


def test_the_placeholder_is_only_where_it_is_filled_in() -> None:
    for path in (*ROOT.glob("*.*"), *ROOT.glob("docs/*.md")):
        if path.is_file() and path.name not in release.FILES:
            assert release.PLACEHOLDER not in path.read_text("utf-8"), path
    for address in PROJECT["urls"].values():
        assert address.startswith(release.PLACEHOLDER)


def requirements(*extras: str) -> set[str]:
    """Return the names of what the extras install directly."""
    optional: dict[str, Any] = PROJECT["optional-dependencies"]
    texts = PROJECT["dependencies"] + [text for extra in extras for text in optional[extra]]
    return {Requirement(text).name for text in texts} - {"tileattn"}


def test_the_bill_of_materials() -> None:
    found = sbom.bill(["cpu"])
    names = {x["name"].replace("-", "_") for x in found["components"]}
    assert names >= requirements("cpu")
    assert "tileattn" not in names
    assert all(x["licenses"] and x["version"] in x["purl"] for x in found["components"])


def test_every_dependency_has_its_licence_in_the_docs() -> None:
    page = (ROOT / "docs/versioning.md").read_text("utf-8")
    extras = ("cpu", "cuda12", "cuda13", "nvrtc", "torch", "jax", "transformers", "mpi", "demo")
    assert [x for x in sorted(requirements(*extras)) if f"| {x} |" not in page] == []


def test_the_oldest_versions_are_those_of_the_metadata() -> None:
    pins = check_install.oldest(["numpy>=2.0", "llvmlite>=0.47; extra == 'cpu'", "mpich"])
    assert pins == ["numpy==2.0", "llvmlite==0.47"]
