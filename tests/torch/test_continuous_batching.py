"""Continuous batching of transformers, whose attention by ``"sdpa"`` the library computes."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.4")

import tileattn.torch.transformers as bridge  # noqa: E402 - it may be absent
from tileattn.torch import sdpa  # noqa: E402 - as above

if not hasattr(transformers, "ContinuousBatchingConfig"):
    pytest.skip("this version has no options for it", allow_module_level=True)

TOKENS, STEPS, LAYERS = 64, 5, 2
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 11, 12, 13, 40], [5, 6, 7, 8]]
SIZES: dict[str, Any] = {
    **{"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS},
    **{"max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": None},
}


def model_of(kind: str, implementation: str, **changed: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changed)
    model = getattr(transformers, f"{kind}ForCausalLM")
    return model._from_config(config, attn_implementation=implementation).eval()


def batched(model: Any) -> list[list[int]]:
    """Generate with continuous batching, in a small cache."""
    greedy = transformers.GenerationConfig(
        max_new_tokens=STEPS, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    small = transformers.ContinuousBatchingConfig(
        page_size=32, num_blocks=16, max_batch_tokens=32, auto_switch_to_flash=False
    )
    found = model.generate_batch(
        inputs=PROMPTS, generation_config=greedy, continuous_batching_config=small
    )
    assert [x.error for x in found.values()] == [None] * len(PROMPTS)
    by_prompt = {tuple(x.prompt_ids): list(x.generated_tokens) for x in found.values()}
    return [by_prompt[tuple(prompt)] for prompt in PROMPTS]


def generated(model: Any) -> list[list[int]]:
    """Generate from one prompt after another."""
    tokens = []
    for prompt in PROMPTS:
        given = torch.tensor([prompt])
        out = model.generate(given, max_new_tokens=STEPS, do_sample=False)
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


@pytest.mark.parametrize(
    ("kind", "changed"),
    [("Llama", {}), ("Mistral", {"sliding_window": 4}), ("Qwen3", {"head_dim": 16})],
)
def test_tokens_are_those_of_eager_attention(kind: str, changed: dict[str, Any]) -> None:
    with sdpa() as taken:
        found = batched(model_of(kind, "sdpa", **changed))
    assert taken.calls >= LAYERS * STEPS
    assert found == generated(model_of(kind, "eager", **changed))


def test_transformers_refuses_other_names() -> None:
    """If it accepts them one day, the documentation must say so."""
    bridge.register()
    with pytest.raises(ValueError, match="tileattn is not supported for continuous batching"):
        batched(model_of("Llama", "tileattn"))
