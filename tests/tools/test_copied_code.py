"""The copy button of an interactive example copies code that runs."""

import pytest

from tools.copied_code import on_page_content

SESSION = (
    '<span class="gp">&gt;&gt;&gt; </span>x <span>=</span> <span>&quot;a&amp;b&quot;</span>\n'
    '<span class="gp">&gt;&gt;&gt; </span><span>if</span> x:\n'
    '<span class="gp">... </span>    <span>print</span>(x)\n'
    '<span class="go">a&amp;b</span>\n'
)


def test_prompts_and_outputs_are_not_copied() -> None:
    page = f'<div class="highlight"><pre><span></span><code>{SESSION}</code></pre></div>'
    made = on_page_content(page)
    copied = "x = &quot;a&amp;b&quot;&#10;if x:&#10;    print(x)"
    assert made == page.replace('"highlight"', f'"highlight" data-copy="{copied}"')


@pytest.mark.parametrize("prompt", ["$ ", "(Pdb) "])
def test_commands_are_copied_without_what_they_print(prompt: str) -> None:
    session = f"{prompt}first\nprinted\n{prompt}second\n"
    page = on_page_content(f'<div class="highlight"><pre><code>{session}</code></pre></div>')
    assert 'data-copy="first&#10;second"' in page


def test_other_blocks_stay() -> None:
    page = '<div class="highlight"><pre><span></span><code>x <span>=</span> 1\n</code></pre></div>'
    assert on_page_content(page) == page
