"""Prepare the sources of a release: check the version, and fill in the repository's address.

    python -m tools.release                                  print the tag of this version
    python -m tools.release https://github.com/OWNER/NAME    change the sources, too

The address replaces a placeholder, and links of README.md that are relative become absolute: PyPI
shows that page by itself. The release workflow runs this before it builds.
"""

import re
import sys
from pathlib import Path

import tileattn

ROOT = Path(__file__).parents[1]
PLACEHOLDER = "https://repository.invalid"
"""Stands for the repository's address in the sources; no host has this name (RFC 2606)."""

FILES = "pyproject.toml", "README.md", "SECURITY.md"
_RELATIVE = re.compile(r'(\]\(|srcset="|src=")(?![a-z]+:|#)([^)"]+)')


def faults(version: str, changelog: str, citation: str) -> list[str]:
    """List what is wrong with the version of a release."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    headings = [section.partition("\n")[0] for section in sections]
    found = []
    if headings[0] != "Unreleased" or sections[0].partition("\n")[2].strip():
        found.append("CHANGELOG.md: the first section must be `Unreleased`, and empty")
    if not re.fullmatch(re.escape(version) + r" - \d{4}-\d\d-\d\d", headings[1]):
        found.append(f"CHANGELOG.md: the second section must be `{version} - DATE`")
    if f"\nversion: {version}\n" not in citation:
        found.append(f"CITATION.cff: the version must be {version}")
    return found


def absolute(page: str, address: str, tag: str) -> str:
    """Make the relative links and pictures of a page absolute."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found[2].endswith((".svg", ".png")) else "blob"
        return f"{found[1]}{address}/{kind}/{tag}/{found[2]}"

    return _RELATIVE.sub(link, page)


def prepare(address: str, tag: str) -> None:
    """Fill the address in, and make the links of pages absolute."""
    for path in (ROOT / name for name in FILES):
        text = path.read_text("utf-8")
        if path.suffix == ".md":
            text = absolute(text, address, tag)
        path.write_text(text.replace(PLACEHOLDER, address), "utf-8")


def main(arguments: list[str]) -> int:
    """Check the version, prepare the sources and print the tag; return the exit status."""
    version = tileattn.__version__
    pages = [(ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "CITATION.cff")]
    found = faults(version, *pages)
    if found:
        print("\n".join(found), file=sys.stderr)
        return 1
    if arguments:
        prepare(arguments[0].rstrip("/"), f"v{version}")
    print(f"v{version}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
