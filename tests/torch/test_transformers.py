"""Models of transformers, made at random, beside their eager attention and a plain one."""

import copy
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.4")

from transformers import masking_utils  # noqa: E402 - it may be absent

import tileattn.torch.transformers as bridge  # noqa: E402 - as above
from tileattn.errors import UnsupportedError  # noqa: E402 - as above
from tileattn.torch import attention  # noqa: E402 - as above

WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
TEXT = WIDTH | ENDS | {"num_hidden_layers": 2, "vocab_size": 64, "max_position_embeddings": 64}
GROUPS = TEXT | {"num_key_value_heads": 2}
EIGHT = {"head_dim": 8, "sliding_window": 5}
LENGTH = 11

DECODERS: dict[str, dict[str, Any]] = {
    "Llama": GROUPS,
    "Mistral": GROUPS | {"sliding_window": 5},
    "Qwen3": GROUPS | {"head_dim": 16},
    "Gemma2": GROUPS | EIGHT | {"attn_logit_softcapping": 2.0},
    "Gemma3": GROUPS | EIGHT | {"layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": GROUPS | EIGHT | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "GPT2": ENDS
    | {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "n_positions": 64}
    | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
}
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": TEXT | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "ModernBert": TEXT
    | {"local_attention": 4, "global_attn_every_n_layers": 2}
    | {"cls_token_id": 2, "sep_token_id": 3},
}
T5: dict[str, Any] = ENDS | {
    **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
}
WHISPER: dict[str, Any] = ENDS | {
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **{"vocab_size": 64, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 10},
    **{"max_target_positions": 20, "decoder_start_token_id": 1, "dropout": 0.0},
}
CONFIGS = {
    **DECODERS,
    **ENCODERS,
    "T5": T5,
    "Whisper": WHISPER,
    "ViT": WIDTH | {"num_hidden_layers": 2, "image_size": 16, "patch_size": 4},
}
CLASSES = {
    **{name: f"{name}ForCausalLM" for name in DECODERS},
    **{name: f"{name}ForMaskedLM" for name in ENCODERS},
    **{name: f"{name}ForConditionalGeneration" for name in ("T5", "Whisper")},
    "GPT2": "GPT2LMHeadModel",
    "ViT": "ViTForImageClassification",
}
SIDES = {"T5": ("none", "left", "right"), "Whisper": ("none",), "ViT": ("none",)}
CASES = [(name, side) for name in CONFIGS for side in SIDES.get(name, ("none", "left", "right"))]


def plain(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Any = 0.0,
    softcap: float | None = None,
    s_aux: Any = None,
    **_others: Any,
) -> tuple[Any, None]:
    """Attention by its formula; the one of eager models has sums in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    s = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s + (0.0 if position_bias is None else position_bias)
    mask = attention_mask
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = torch.ones(s.shape[-2:], dtype=torch.bool)
        mask = mask.tril() if causal and s.shape[-2] > 1 else mask
    s = s.masked_fill(~mask, torch.finfo(s.dtype).min)
    if s_aux is not None:
        s = torch.cat([s, s_aux[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    p = s.softmax(-1)[..., : key.shape[2]] * mask
    return (p @ value).transpose(1, 2), None


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.AttentionInterface.register("plain", plain)
    transformers.AttentionMaskInterface.register("plain", masking_utils.sdpa_mask)
    bridge.register()
    bridge.register()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options of each call of attention."""
    found: list[dict[str, Any]] = []

    def recorded(*qkv: Any, **options: Any) -> Any:
        found.append({name: x for name, x in options.items() if x is not None})
        return attention(*qkv, **options)

    monkeypatch.setattr(bridge, "attention", recorded)
    return found


@cache
def model(name: str, implementation: str, dtype: Any = torch.float32, **changes: Any) -> Any:
    """Make a model; those of a name have the same parameters."""
    torch.manual_seed(0)
    of_text = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, of_text)(**CONFIGS[name] | changes)
    made = getattr(transformers, CLASSES[name])._from_config(
        config, attn_implementation=implementation, experts_implementation="eager"
    )
    for parameter in made.parameters():  # sinks and biases are 0 at first
        parameter.data += 0.05 * torch.randn_like(parameter)
    return made.eval().to(dtype)


def padding(side: str) -> Any:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if side == "left":
        mask[1, :4] = 0
    if side == "right":
        mask[1, -3:] = 0
    return mask


def inputs_of(name: str, side: str) -> dict[str, Any]:
    torch.manual_seed(1)
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    labels = torch.randint(2, 64, (2, 7))
    if name == "Whisper":
        return {"input_features": torch.randn(2, 8, 20), "labels": labels}
    tokens, mask = torch.randint(2, 64, (2, LENGTH)), padding(side)
    given = {"input_ids": tokens} if side == "none" else {"input_ids": tokens, "attention_mask": mask}
    if name == "T5":
        return given | {"labels": labels}
    # A decoder predicts the first token from padding, where eager attention is uniform.
    after_padding = mask * torch.roll(mask, 1, 1)
    return given | {"labels": tokens.masked_fill(after_padding == 0, -100)}


def agree(ours: Any, theirs: Any, tolerance: float, **inputs: Any) -> None:
    """Compare losses, logits where there are labels, and the gradients of all parameters."""
    seen = inputs["labels"] >= 0
    results = []
    for made in (ours, theirs):
        made.zero_grad()
        inputs = {n: x.to(made.dtype) if x.is_floating_point() else x for n, x in inputs.items()}
        result = made(**inputs)
        result.loss.backward()
        grads = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
        results.append(grads | {"loss": result.loss, "logits": result.logits[seen]})
    found, expected = results
    assert found.keys() == expected.keys()
    # Some gradients, as those of the biases of keys, are 0 but for rounding.
    floor = 0.01 * max(x.norm() for x in expected.values())
    for name, x in expected.items():
        assert (found[name] - x).norm() <= tolerance * (x.norm() + floor), name


@pytest.mark.parametrize(("name", "side"), CASES)
def test_models_agree_with_eager_attention(name: str, side: str) -> None:
    agree(model(name, "tileattn"), model(name, "eager"), 2e-5, **inputs_of(name, side))


@pytest.mark.parametrize(("name", "side"), CASES)
def test_models_agree_in_float64(name: str, side: str) -> None:
    double = partial(model, name, dtype=torch.float64)
    agree(double("tileattn"), double("plain"), 1e-11, **inputs_of(name, side))
