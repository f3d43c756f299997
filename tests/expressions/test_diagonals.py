"""Whether an expression goes by the distance of a query and a key alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.expressions.random_functions import AUX, as_function, drawn
from tileattn.expressions.diagonals import by_distance
from tileattn.expressions.evaluate import evaluate
from tileattn.expressions.functions import score_expression

TABLE = np.arange(40.0)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda s, b, h, i, j, t: t[h] * b, True),
        (lambda s, b, h, i, j, t: t[abs(i - j)] + h, True),
        (lambda s, b, h, i, j, t: np.where(i < j, t[j - i], 0.0), True),
        (lambda s, b, h, i, j, t: t[(h + i) - (j + b)], True),
        (lambda s, b, h, i, j, t: t[(i + i) - (j + b)], False),
        (lambda s, b, h, i, j, t: t[(i + h) - (j * b)], False),
        (lambda s, b, h, i, j, t: t[i], False),
        (lambda s, b, h, i, j, t: t[abs(i - j)] * j, False),
        (lambda s, b, h, i, j, t: t[i - j - j], False),
        (lambda s, b, h, i, j, t: s + t[abs(i - j)], False),
    ],
)
def test_by_distance(function: Any, expected: bool) -> None:
    assert by_distance([score_expression(function, (TABLE,))]) == expected


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_diagonals_are_constant(data: Any) -> None:
    function = as_function(drawn(data.draw, "f", data.draw(st.integers(1, 5))))
    try:
        node = score_expression(lambda s, *places: function(0.0 * s, *places), AUX)
    except ValueError:
        return  # an index is out of range everywhere
    if not by_distance([node]):
        return
    grid = np.ogrid[:1, :1, 3:11, :8]
    inputs = dict(zip("bhij", grid, strict=True))
    with np.errstate(all="ignore"):
        (x,) = evaluate([node], inputs, AUX, np.dtype(np.float64))
    x = np.broadcast_to(x, (1, 1, 8, 8))
    np.testing.assert_array_equal(x[..., 1:, 1:], x[..., :-1, :-1])
