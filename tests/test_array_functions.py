"""Functions written with PyTorch's functions and methods: what they are in NumPy's."""

from typing import Any

import numpy as np
import pytest

import tileattn
from tileattn import reference
from tileattn.expressions.functions import mask_expression, score_expression

torch = pytest.importorskip("torch", reason="its functions are traced: pip install torch")

NAMES = {"torch": torch, "np": np, "F": torch.nn.functional, "inf": float("inf")}

SAME: list[tuple[str, str]] = [
    ("torch.where(i >= j, s, -inf)", "np.where(i >= j, s, -inf)"),
    ("torch.where(i >= j, input=s, other=0.5)", "np.where(i >= j, s, 0.5)"),
    ("s.where(i >= j, -1.0)", "np.where(i >= j, s, -1.0)"),
    ("s.masked_fill(i < j, -inf)", "np.where(i < j, -inf, s)"),
    ("torch.tanh(s / 5) * 5", "np.tanh(s / 5) * 5"),
    ("s - torch.abs(i - j)", "s - np.abs(i - j)"),
    ("s - (i - j).abs().float()", "s - abs(i - j).astype(float)"),
    ("s + i.to(torch.float32)", "s + i.astype(float)"),
    ("s + (2 * s).to(dtype=torch.int64)", "s + (2 * s).astype(int)"),
    ('s.to("cuda").to(torch.device("cpu")) * 2', "s * 2"),
    ("s.to(torch.bfloat16) + i.bool()", "s + i.astype(bool)"),
    ("s.double() + s.int() + s.long()", "s + s.astype(int) + s.astype(int)"),
    ("s.clamp(min=-1) + s.clamp(-1, 1)", "np.maximum(s, -1) + np.clip(s, -1, 1)"),
    ("torch.clamp(s, max=2) * s.clip(0, 3)", "np.minimum(s, 2) * np.clip(s, 0, 3)"),
    ("torch.exp(-s.square())", "np.exp(-np.square(s))"),
    ("torch.minimum(i, j) + s.sin().cos()", "np.minimum(i, j) + np.cos(np.sin(s))"),
    ("torch.maximum(i, torch.tensor(3)) + s", "np.maximum(i, 3) + s"),
    ("torch.log1p(s * s) + torch.atan(s)", "np.log1p(s * s) + np.arctan(s)"),
    ("torch.round(s) + s.ceil() + s.floor()", "np.round(s) + np.ceil(s) + np.floor(s)"),
    ("torch.remainder(s, 3) + i % 2", "s % 3 + i % 2"),
    ("torch.pow(s, 2) + s.pow(3) + torch.pow(2.0, s)", "s**2 + s**3 + 2.0**s"),
    ("torch.sub(s, i) * s.mul(2).add(1).div(3)", "(s - i) * ((s * 2 + 1) / 3)"),
    ("s * torch.isin(i, torch.tensor([3, 1]))", "s * np.isin(i, [1, 3])"),
    ('s * torch.div(i, 3, rounding_mode="floor")', "s * (i // 3)"),
    ("F.relu(s) + torch.zeros_like(s)", "np.where(s <= 0, 0, s) + 0.0"),
    ("torch.tensor(2.0) * s - torch.tensor(1)", "2.0 * s - 1"),
    ("F.softplus(s)", "np.logaddexp(s, 0.0)"),
    ("torch.sigmoid(s) * s.sigmoid()", '(y := s.named("sigmoid", s)) * y'),
    ("torch.special.expit(s) + F.logsigmoid(s)", "s.sigmoid() + -np.logaddexp(-s, 0.0)"),
    ("torch.erf(s) + torch.special.erf(s)", '(y := s.named("erf", s)) + y'),
    ("s.to(i) + i.to(s) / 2", "s.astype(int) + i.astype(float) / 2"),
    ("s + s.to(torch.arange(3))", "s + s.astype(int)"),
    ("s * torch.isin(i, torch.tensor([[3, 1], [0, 1]]))", "s * np.isin(i, [0, 1, 1, 3])"),
    ("s + (i << i.new_ones(())) + s.new_ones(())", "s + (i << 1) + 1.0"),
    ("s + torch.full_like(i, 2.5)", "s + np.full_like(i, 2)"),
    ("s * i.eq(j) + s * i.lt(j) + i.ge(j)", "s * (i == j) + s * (i < j) + (i >= j)"),
]
"""Two functions that are the same, in PyTorch's words and in NumPy's."""


def function_of(text: str, parameters: str = "s, b, h, i, j") -> Any:
    return eval(f"lambda {parameters}: {text}", NAMES)


@pytest.mark.parametrize(("in_torch", "in_numpy"), SAME)
def test_functions_of_pytorch_are_those_of_numpy(in_torch: str, in_numpy: str) -> None:
    """The expressions are one, and the oracle computes the same."""
    one, other = map(function_of, (in_torch, in_numpy))
    assert score_expression(one, ()) == score_expression(other, ())
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5))
    with np.errstate(all="ignore"):
        found, expected = (reference.forward(x, x, x, score_mod=f) for f in (one, other))
    np.testing.assert_array_equal(found.out, expected.out)


MASKS: list[tuple[str, str]] = [
    ("torch.logical_and(i >= j, ~(j < 3))", "np.logical_and(i >= j, ~(j < 3))"),
    ("(i >= j).logical_or(j == 0)", "np.logical_or(i >= j, j == 0)"),
    ("torch.abs(i - j).le(4)", "np.abs(i - j) <= 4"),
    ("(i - j).bool()", "(i - j).astype(bool)"),
    ("b.new_ones((), dtype=torch.bool) & (i >= j)", "np.True_ & (i >= j)"),
    ("b.new_zeros((), dtype=torch.bool) | (i >= j)", "np.False_ | (i >= j)"),
]


@pytest.mark.parametrize(("in_torch", "in_numpy"), MASKS)
def test_masks_of_pytorch_are_those_of_numpy(in_torch: str, in_numpy: str) -> None:
    one, other = (function_of(text, "b, h, i, j") for text in (in_torch, in_numpy))
    assert mask_expression(one, ()) == mask_expression(other, ())
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5))
    found, expected = (reference.forward(x, x, x, mask_mod=f) for f in (one, other))
    np.testing.assert_array_equal(found.out, expected.out)


def test_masks_that_pytorch_combines() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    ids = np.arange(5) // 2
    q, k, _, v = np.random.default_rng(0).normal(size=(4, 2, 3, 5, 8))
    q = q[:, :, :4]
    documents, causal = lambda _b, _h, i, j: ids[i] == ids[j], lambda _b, _h, i, j: i >= j
    for combined, mask in ((flex.and_masks, np.logical_and), (flex.or_masks, np.logical_or)):
        pairs = mask(ids[:4, None] == ids, np.arange(4)[:, None] >= np.arange(5))
        found = tileattn.forward(q, k, v, mask_mod=combined(documents, causal), backend="numpy")
        expected = tileattn.forward(q, k, v, mask=pairs, backend="numpy")
        np.testing.assert_array_equal(found.out, expected.out)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, *_: torch.cumsum(s, 0), "score_mod calls cumsum; functions must be among"),
        (lambda s, *_: torch.add(s, 1, alpha=2), "score_mod calls add with alpha; leave them out"),
        (lambda s, *_: torch.clamp(s, 0, 1, 2), "clamp"),
        (
            lambda s, *_: s.to(torch.complex64),
            "score_mod must convert to bool, int or float; got torch.complex64",
        ),
        (
            lambda s, *_: s.to([torch.int32]),
            r"score_mod must convert to a dtype or a device, or with a flag; got \[torch.int32\]",
        ),
        (
            lambda s, *_: s.type("torch.LongTensor"),
            "score_mod must convert to a dtype .* got 'torch.LongTensor'",
        ),
        (
            lambda s, *_: torch.div(s, 2, rounding_mode="trunc"),
            "score_mod divides with rounding_mode",
        ),
    ],
)
def test_what_is_refused_of_pytorch(function: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        score_expression(function, ())


def test_methods_that_are_missing_are_named() -> None:
    with pytest.raises(AttributeError, match=r"^score_mod reads \.cumsum of a number"):
        score_expression(lambda s, *_: s.cumsum(0), ())
