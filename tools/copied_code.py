"""Let the copy button of an interactive example copy only its code: a hook of MkDocs."""

import html
import re
from typing import Any

_BLOCK = re.compile(r'<div class="highlight">(.*?)</div>', re.DOTALL)
_PROMPT = re.compile(r"(?:>>>|\.\.\.)(?: |$)|\$ |\(Pdb\) ")  # of Python, a shell and a debugger


def code_of(session: str) -> str:
    r"""Return the code of an interactive session, without prompts and without what it prints.

    >>> code_of(">>> for x in (1, 2):\n...     print(x)\n1\n2\n")
    'for x in (1, 2):\n    print(x)'
    """
    lines = ((line, _PROMPT.match(line)) for line in session.splitlines())
    return "\n".join(line[prompt.end() :] for line, prompt in lines if prompt)


def on_page_content(content: str, **_: Any) -> str:
    """Say what the theme's button copies (``data-copy``); MkDocs calls it by this name."""

    def marked(found: re.Match[str]) -> str:
        text = html.unescape(re.sub(r"<[^>]*>", "", found[1]))
        if not _PROMPT.match(text):
            return found[0]
        copied = html.escape(code_of(text)).replace("\n", "&#10;")
        return f'<div class="highlight" data-copy="{copied}">{found[1]}</div>'

    return _BLOCK.sub(marked, content)
