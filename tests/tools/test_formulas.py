"""Formulas of the docs become MathML, or the build fails."""

import pytest

pytest.importorskip("latex2mathml", reason="only the docs need it: pip install latex2mathml")

from tools.formulas import mathml, on_page_content


def test_formulas_of_a_page_are_converted() -> None:
    page = (
        r'<p>With <span class="arithmatex">\(a &lt; b\)</span>:</p>'
        '<div class="arithmatex">\\[\n\\frac{x}{\\ell}\n\\]</div><code>\\(x\\)</code>'
    )
    made = on_page_content(page)
    assert made.startswith(
        '<p>With <math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">'
    )
    assert made.endswith(r"</math></div><code>\(x\)</code>")
    assert "<mo>&#x0003C;</mo>" in made
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">' in made
    assert "<mfrac><mrow><mi>x</mi></mrow><mrow><mi>&#x02113;</mi></mrow></mfrac>" in made
    assert "arithmatex" not in made


@pytest.mark.parametrize("tex", [r"\nosuch{x}", r"\begin{aligned} a &= b \end{aligned}"])
def test_what_is_not_understood_is_refused(tex: str) -> None:
    with pytest.raises(ValueError, match="no MathML for"):
        mathml(tex, block=True)
