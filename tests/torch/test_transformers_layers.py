"""The attention of a layer of transformers, without a model."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.4")

from transformers.integrations.sdpa_attention import (  # noqa: E402 - it may be absent
    sdpa_attention_forward,
)

import tileattn.torch.transformers as bridge  # noqa: E402 - as above
from tileattn.errors import UnsupportedError  # noqa: E402 - as above
from tileattn.torch import attention  # noqa: E402 - as above

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mask", [None, False, "booleans", "numbers"])
def test_layers_agree_with_those_of_sdpa(rows: int, bias: bool, mask: Any) -> None:
    if bias and VERSION < (5, 14):
        pytest.skip("layers of sdpa take position_bias since transformers 5.14")
    q, k, v = torch.randn(2, 4, rows, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 5)
    options: dict[str, Any] = {"attention_mask": None, "scaling": 0.3}
    if mask is False:
        options["is_causal"] = False
    elif mask:
        booleans = torch.arange(6) < torch.tensor([4, 5])[:, None, None, None]
        numbers = torch.where(booleans, 0.5, -1e9)
        options["attention_mask"] = booleans if mask == "booleans" else numbers
    if bias:
        options["position_bias"] = torch.randn(1, 4, rows, 6)
    module = torch.nn.Identity()
    module.is_causal = True
    expected = sdpa_attention_forward(module, q, k, v, **options)[0]
    torch.testing.assert_close(bridge.attention_forward(module, q, k, v, **options)[0], expected)


def test_queries_of_a_batch_of_one() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(5, 2, 6, 4)
    module = torch.nn.Identity()
    out, _ = bridge.attention_forward(module, q, k, k, None)
    torch.testing.assert_close(out, attention(q.expand(5, -1, -1, -1), k, k).transpose(1, 2))


@pytest.mark.parametrize("name", sorted(bridge._REFUSED))
def test_what_is_not_computed_is_refused(name: str) -> None:
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedError, match=f"{name} must be None: .*'eager'"):
        bridge.attention_forward(torch.nn.Identity(), x, x, x, None, **{name: torch.ones(2)})
    absent: dict[str, Any] = {name: None}
    bridge.attention_forward(torch.nn.Identity(), x, x, x, None, **absent)


def test_layers_that_do_not_say_whether_they_are_causal_are_not() -> None:
    """Cross attention is such a layer; in eager attention no layer is causal without a mask."""
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 5)
    out, _ = bridge.attention_forward(torch.nn.Identity(), q, k, v, None)
    torch.testing.assert_close(out, attention(q, k, v).transpose(1, 2))
    causal, _ = bridge.attention_forward(torch.nn.Identity(), q, k, v, None, is_causal=True)
    assert not torch.equal(causal, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_queries_whose_mask_of_numbers_hides_all_keys_have_output_0(dtype: Any) -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).to(dtype).requires_grad_().unbind()
    booleans = torch.tensor([True, False, True, True, False])[:, None] & torch.ones(5).bool()
    numbers = torch.where(booleans, 0.0, torch.finfo(dtype).min).to(dtype)
    module = torch.nn.Identity()
    results = []
    for mask in (booleans, numbers):
        out, _ = bridge.attention_forward(module, q, k, v, mask[None, None])
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert results[1][0].transpose(1, 2)[:, :, ~booleans[:, 0]].eq(0).all()


# --- the arguments that models pass ---------------------------------------------------------------

# The mask says the same, or the argument changes nothing here.
IGNORED = {
    *("cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "sliding_window"),
    "deterministic",
}


def calls_of_attention(source: str) -> Iterator[ast.Call]:
    """Find the calls of attention functions in a file, without parsing all of it."""
    lines = [x for x in source.splitlines() if " = ALL_ATTENTION_FUNCTIONS" in x]
    taken = {re.split("[:=]", line)[0].strip() for line in lines}
    for match in re.finditer(rf"\b({'|'.join(taken)})\(", source) if taken else ():
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        found = ast.parse(source[match.start() : end], mode="eval").body
        assert isinstance(found, ast.Call)
        yield found


def test_arguments_that_models_of_transformers_pass_are_known() -> None:
    """If a new release passes another argument: support it, refuse it, or list it as ignored."""
    known = {*inspect.signature(bridge.attention_forward).parameters, *bridge._REFUSED, *IGNORED}
    known |= {"cu_seq_lens_q", "output_attentions"}
    files = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    found = {
        (path.name, keyword.arg)
        for path in files
        for call in calls_of_attention(path.read_text(encoding="utf-8"))
        for keyword in call.keywords
    }
    assert len(found) > 500
    assert {(file, name) for file, name in found if name is not None and name not in known} == set()
