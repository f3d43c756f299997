"""Models of transformers on a GPU, made at random, beside their eager attention."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.on_gpu import needs_gpu

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.4")

from transformers import masking_utils  # noqa: E402 - it may be absent

from tests.torch import test_transformers as on_cpu  # noqa: E402 - transformers may be absent
from tests.torch import test_transformers_kinds as kinds  # noqa: E402 - as above
from tests.torch import test_transformers_layers as layers  # noqa: E402 - as above
from tileattn.torch import transformers as bridge  # noqa: E402 - as above

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]

WIDTH = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 128}
CHANGES: dict[str, dict[str, Any]] = {
    "Llama": WIDTH,
    "Gemma2": WIDTH | {"head_dim": 64, "query_pre_attn_scalar": 64},
    "GptOss": WIDTH | {"head_dim": 64},
    "T5": {"d_model": 128, "d_kv": 64},
}
LENGTH = 71  # odd: biases and masks of all layers have the same alignment, so the same kernels


@pytest.fixture(autouse=True)
def _on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.AttentionInterface.register("plain", on_cpu.plain)
    transformers.AttentionMaskInterface.register("plain", masking_utils.sdpa_mask)
    bridge.register()
    with torch.device("cuda"):
        yield


@cache
def model(name: str, implementation: str, dtype: Any = torch.float32) -> Any:
    """Make a model; ``"plain"`` computes in float64 with the parameters of the dtype."""
    made = on_cpu.model.__wrapped__(name, implementation, dtype, **CHANGES[name])
    return made.double() if implementation == "plain" else made


def inputs_of(name: str, side: str) -> dict[str, Any]:
    torch.manual_seed(1)
    tokens = torch.randint(2, 64, (2, LENGTH))
    mask = torch.ones_like(tokens)
    if side == "left":
        mask[1, :9] = 0
    after_padding = mask * torch.roll(mask, 1, 1)
    labels = tokens.masked_fill(after_padding == 0, -100)
    return {
        **{"input_ids": tokens} | ({} if side == "none" else {"attention_mask": mask}),
        "labels": tokens[:, :35].contiguous() if name == "T5" else labels,
    }


def results_of(made: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Give logits where there are labels, and the gradients of all parameters.

    The error of the loss says less: that of one number may be 0 by chance.
    """
    made.zero_grad()
    result = made(**inputs)
    result.loss.backward()
    found = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    found |= {"logits": result.logits[inputs["labels"] >= 0]}
    return {name: x.detach().double() for name, x in found.items()}


# Few, for each that differs has a dozen kernels of its own to compile. The decoder of T5 is without
# padding beside its encoder with it, and Gemma2 differs from Llama by the soft cap.
CASES = [("Llama", "none"), ("Llama", "left"), ("Gemma2", "left"), ("T5", "left")]
CASES_OF = {
    torch.float32: [*CASES, ("GptOss", "none"), ("GptOss", "left")],
    torch.bfloat16: CASES,  # with experts, rounding to 16 bits may choose another one
}


@pytest.mark.parametrize(
    ("dtype", "name", "side"),
    [(dtype, *case) for dtype, cases in CASES_OF.items() for case in cases],
    ids=str,
)
def test_errors_are_those_of_eager_attention(name: str, dtype: Any, side: str) -> None:
    inputs = inputs_of(name, side)
    ours, theirs, exact = (
        results_of(model(name, each, dtype), inputs) for each in ("tileattn", "eager", "plain")
    )
    assert ours.keys() == exact.keys()
    epsilon = torch.finfo(dtype).eps
    # Some gradients, as those of the biases of keys, are 0 but for rounding.
    floor = 0.01 * max(x.norm() for x in exact.values())
    for n, x in exact.items():
        error, allowed = ((y[n] - x).norm() for y in (ours, theirs))
        assert error <= 2 * allowed + epsilon * (x.norm() + floor), (n, error, allowed, x.norm())


@pytest.mark.parametrize("cached", ["dynamic", "static"])
@pytest.mark.parametrize("name", CHANGES)
def test_models_generate_the_same_tokens(name: str, cached: str) -> None:
    """With left padding, beyond the window, greedily."""
    given = inputs_of(name, "left") | {"max_new_tokens": 8, "do_sample": False}
    del given["labels"]
    expected = model(name, "eager").generate(**given)
    assert expected.shape[1] >= 8
    if cached == "static":
        given |= {"cache_implementation": cached, "disable_compile": True}
    assert torch.equal(model(name, "tileattn").generate(**given), expected)


# Llama takes masks of booleans, and Gemma2, which does not support sdpa, masks of numbers.
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_steps_that_transformers_compiles_generate_the_same_tokens(name: str) -> None:
    """As it does with a static cache on a GPU, with CUDA graphs."""
    given = inputs_of(name, "left") | {"max_new_tokens": 8, "do_sample": False}
    del given["labels"]
    expected = model(name, "eager").generate(**given)
    ours = model(name, "tileattn")
    assert torch.equal(ours.generate(**given, cache_implementation="static"), expected)
    assert hasattr(ours, "_compiled_call")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_queries_whose_mask_of_numbers_hides_all_keys_have_output_0(dtype: Any) -> None:
    layers.test_queries_whose_mask_of_numbers_hides_all_keys_have_output_0(dtype)


@pytest.mark.parametrize("side", ["left", "right"])
def test_layers_that_add_the_mask_to_their_scores(side: str) -> None:
    """The encoder of BigBird-Pegasus does; its decoder takes attention from the interface."""
    name = "BigBirdPegasusForConditionalGeneration"
    ours, theirs = kinds.both.__wrapped__(name)
    on_cpu.agree(ours, theirs, 2e-5, **kinds.inputs_of(name, side))
