"""Formulas of the docs as MathML, which browsers render by themselves: a hook of MkDocs."""

import html
import re
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert

# What the arithmatex extension marks: TeX between \( and \) in a line, else between \[ and \].
_MARKED = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)


def mathml(tex: str, *, block: bool) -> str:
    r"""Convert TeX, without its delimiters, to a ``math`` element.

    A command that is not understood is refused: it would be shown as it is written.

    >>> mathml(r"\ell", block=False).count("<mi>&#x02113;</mi>")
    1
    """
    made: str = convert(tex, display="block" if block else "inline")
    try:
        words = "".join(ElementTree.fromstring(made).itertext())
    except ElementTree.ParseError:
        words = "\\"
    if "\\" in words:
        raise ValueError(f"no MathML for {tex.strip()!r}; another command may be understood")
    # assets/site.css gives it a scroll bar where the page is narrower.
    return f'<div class="formula">{made}</div>' if block else made


def on_page_content(content: str, **_: Any) -> str:
    """Put MathML in the place of all formulas of a page; MkDocs calls it by this name."""
    return _MARKED.sub(lambda m: mathml(html.unescape(m[2]), block=m[1] == "div"), content)
