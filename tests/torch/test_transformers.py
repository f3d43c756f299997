"""Randomly initialised transformers models, compared with eager attention."""

import copy
import importlib.metadata
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.4")

from transformers import masking_utils  # noqa: E402 - it may be absent

import tileattn.torch.transformers as bridge  # noqa: E402 - as above
from tileattn.errors import UnsupportedError  # noqa: E402 - as above
from tileattn.torch import attention  # noqa: E402 - as above

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

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
    "Llama4": GROUPS
    | {"head_dim": 8, "attention_chunk_size": 4, "intermediate_size_mlp": 48, "moe_layers": []},
    "DeepseekV3": TEXT
    | dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8)
    | dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16)
    | {"num_key_value_heads": 4, "v_head_dim": 12, "first_k_dense_replace": 2},
    "GPT2": ENDS
    | {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "n_positions": 64}
    | {"scale_attn_by_inverse_layer_idx": True}
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
    """Compute attention by its formula in the dtype of q; eager attention sums in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    s = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s + (0.0 if position_bias is None else position_bias)
    mask = attention_mask
    if mask is None:
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
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


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The models are so small that more threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the options of each call of attention."""
    found: list[dict[str, Any]] = []

    def recorded(*qkv: Any, **options: Any) -> Any:
        found.append({name: x for name, x in options.items() if x is not None})
        return attention(*qkv, **options)

    monkeypatch.setattr(bridge, "attention", recorded)
    return found


@cache
def model(name: str, implementation: str, dtype: Any = torch.float32, **changes: Any) -> Any:
    """Make a model; models of one name have the same parameters."""
    if name == "T5" and VERSION < (5, 15):
        pytest.skip("T5 takes its attention from AttentionInterface since transformers 5.15")
    torch.manual_seed(0)
    part = "Text" if name in ("Gemma3", "Llama4") else ""
    config = getattr(transformers, f"{name}{part}Config")(**CONFIGS[name] | changes)
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
    given = (
        {"input_ids": tokens} if side == "none" else {"input_ids": tokens, "attention_mask": mask}
    )
    if name == "T5":
        return given | {"labels": labels}
    # A decoder predicts the first token from padding, where eager attention is uniform.
    after_padding = mask * torch.roll(mask, 1, 1)
    return given | {"labels": tokens.masked_fill(after_padding == 0, -100)}


def agree(ours: Any, theirs: Any, tolerance: float, **inputs: Any) -> None:
    """Compare losses, logits at labels, and the gradients of all parameters."""
    results = []
    for made in (ours, theirs):
        made.zero_grad()
        result = made(**inputs)
        result.loss.backward()
        found = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
        found |= {"loss": result.loss, "logits": result.logits[inputs["labels"] >= 0]}
        results.append(found)
    found, expected = results
    assert found.keys() == expected.keys()
    # Some gradients, as those of the biases of keys, are 0 but for rounding.
    floor = 0.01 * max(x.norm() for x in expected.values())
    for name, x in expected.items():
        assert (found[name] - x).norm() <= tolerance * (x.norm() + floor), name


@pytest.mark.parametrize(("name", "side"), CASES)
def test_models_agree_with_eager_attention(name: str, side: str) -> None:
    agree(model(name, "tileattn"), model(name, "eager"), 2e-5, **inputs_of(name, side))


# --- generation -----------------------------------------------------------------------------------

GENERATORS = [*DECODERS, "T5", "Whisper"]


@pytest.mark.parametrize("cached", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATORS)
def test_models_generate_the_same_tokens(name: str, cached: str) -> None:
    """Greedy, with left padding, and longer than the window."""
    if (name, cached) == ("Llama4", "static") and (5, 9) <= VERSION < (5, 20):
        pytest.skip("transformers 5.9 to 5.19 make no masks of chunks for generation")
    given = inputs_of(name, "left") | {"max_new_tokens": 8, "do_sample": False}
    del given["labels"]
    expected = model(name, "eager").generate(**given)
    assert expected.shape[1] >= 8
    given |= {"cache_implementation": cached} if cached == "static" else {}
    assert torch.equal(model(name, "tileattn").generate(**given), expected)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["none", "left"])
def test_steps_that_transformers_compiles_generate_the_same_tokens(side: str) -> None:
    """transformers does so by default with a static cache on a GPU."""
    given = inputs_of("Gemma2", side) | {"max_new_tokens": 8, "do_sample": False}
    del given["labels"]
    expected = model("Gemma2", "eager").generate(**given)
    compiling = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiling._compile_all_devices = True
    given |= {"cache_implementation": "static", "compile_config": compiling}
    ours = copy.deepcopy(model("Gemma2", "tileattn"))
    torch._dynamo.reset()
    assert torch.equal(ours.generate(**given), expected)
    assert hasattr(ours, "_compiled_call")


def test_a_prompt_in_parts_continues_the_cache() -> None:
    tokens = inputs_of("Mistral", "none")["input_ids"]
    ours = model("Mistral", "tileattn")
    whole = ours(tokens).logits
    first = ours(tokens[:, :6], use_cache=True)
    rest = ours(tokens[:, 6:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 6:])


# --- masks ----------------------------------------------------------------------------------------


def names_of(call: dict[str, Any]) -> set[str]:
    return call.keys() - {"scale", "softcap", "sinks", "bias"}


@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("Llama", {"none": set(), "left": {"mask"}, "right": {"kv_lengths", "q_offset"}}),
        ("Gemma2", {"none": set(), "left": {"mask"}, "right": {"kv_lengths", "q_offset"}}),
    ],
)
def test_padding_and_windows_are_options(
    name: str, sides: dict[str, set[str]], calls: list[dict[str, Any]]
) -> None:
    for side, more in sides.items():
        calls.clear()
        model(name, "tileattn")(**inputs_of(name, side))
        assert [names_of(call) for call in calls] == [{"window"} | more] * 2
        windows = [call["window"] for call in calls]
        assert windows == [(4 if name == "Gemma2" else None, 0), (None, 0)]
        assert all(call["mask"].shape == (2, 1, 1, LENGTH) for call in calls if "mask" in call)


def test_encoders_need_no_mask(calls: list[dict[str, Any]]) -> None:
    model("ModernBert", "tileattn")(**inputs_of("ModernBert", "none"))
    assert [names_of(call) for call in calls] == [set(), {"window"}]
    assert calls[1]["window"] == (2, 2)


def test_a_static_cache_is_read_to_its_length(calls: list[dict[str, Any]]) -> None:
    """When the cache is full, the offset is the default and is left out."""
    given = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    model("Llama", "tileattn").generate(inputs_of("Llama", "none")["input_ids"], **given)
    first, last = calls[:6], calls[-2:]
    assert all(names_of(call) == {"window", "q_offset"} for call in first)
    assert [call["q_offset"] for call in first] == [0, 0, LENGTH, LENGTH, LENGTH + 1, LENGTH + 1]
    assert all({"window"} <= names_of(call) <= {"window", "q_offset"} for call in calls)
    assert all(call.get("q_offset", LENGTH + 6) == LENGTH + 6 for call in last)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_sequences(name: str, calls: list[dict[str, Any]]) -> None:
    tokens = torch.randint(2, 64, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    inputs = {"input_ids": tokens, "position_ids": positions, "labels": tokens, "use_cache": False}
    agree(model(name, "tileattn"), model(name, "eager"), 2e-5, **inputs)
    assert all("mask_mod" in call for call in calls)
    whole = model(name, "tileattn")(**inputs).logits
    alone = model(name, "tileattn")(tokens[:, 5:]).logits
    torch.testing.assert_close(whole[:, 5:], alone)


def test_a_mask_of_the_users_own() -> None:
    """The mask has four axes; numbers are added to scores."""
    inputs = inputs_of("Llama", "none")
    mask = (torch.rand(2, 1, LENGTH, LENGTH) < 0.5) | torch.eye(LENGTH, dtype=torch.bool)
    added = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    ours, theirs = model("Llama", "tileattn"), model("Llama", "eager")
    expected = theirs(**inputs, attention_mask=added).logits
    for given_mask in (mask, added):
        torch.testing.assert_close(ours(**inputs, attention_mask=given_mask).logits, expected)


# --- the rest -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "GptOss"])
def test_bfloat16(name: str) -> None:
    tokens = inputs_of(name, "none")["input_ids"]
    exact = model(name, "plain", torch.float64)(tokens).logits
    ours, theirs = (
        (model(name, each, torch.bfloat16)(tokens).logits - exact).norm()
        for each in ("tileattn", "eager")
    )
    assert ours <= 1.5 * theirs


def test_dropout_is_that_of_training() -> None:
    ours = copy.deepcopy(model("Llama", "tileattn", attention_dropout=0.5))
    tokens = inputs_of("Llama", "none")["input_ids"]
    assert torch.equal(ours(tokens).logits, model("Llama", "tileattn")(tokens).logits)
    ours.train()
    torch.manual_seed(1)
    first = ours(tokens).logits
    assert not torch.equal(ours(tokens).logits, first)
    torch.manual_seed(1)
    assert torch.equal(ours(tokens).logits, first)


@pytest.mark.parametrize("side", ["none", "left"])
def test_compiled_models(side: str) -> None:
    ours, inputs = model("Mistral", "tileattn"), inputs_of("Mistral", side)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    logits = compiled(**inputs, use_cache=False).logits
    torch.testing.assert_close(logits, ours(**inputs).logits)


@pytest.mark.parametrize("how", ["call", "config"])
@pytest.mark.parametrize("name", ["Llama", "Bert", "GPT2", "T5", "Whisper", "ViT"])
def test_models_refuse_to_return_probabilities(name: str, how: str) -> None:
    asked = {"output_attentions": True}
    made = model(name, "tileattn", **asked if how == "config" else {})
    with pytest.raises(UnsupportedError, match=r"output_attentions must be False.*'eager'"):
        made(**inputs_of(name, "none"), **asked if how == "call" else {})


def test_offsets_of_sequences_need_positions_that_say_the_same() -> None:
    tokens = torch.randint(2, 64, (1, 12))
    given = {"input_ids": tokens, "use_cache": False}
    given["cu_seq_lens_q"] = given["cu_seq_lens_k"] = torch.tensor([0, 5, 12])
    with pytest.raises(UnsupportedError, match="position_ids that start again"):
        model("Llama", "tileattn")(**given)
    positions = torch.tensor([[*range(5), *range(7)]])
    model("Llama", "tileattn")(**given, position_ids=positions)


def test_absent_transformers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "tileattn.torch.transformers")
    with pytest.raises(ImportError, match=r"pip install 'transformers>=5\.4'"):
        importlib.import_module("tileattn.torch.transformers")


def test_transformers_that_are_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "5.3.0")
    monkeypatch.delitem(sys.modules, "tileattn.torch.transformers")
    with pytest.raises(ImportError, match=r"needs transformers 5\.4 or later"):
        importlib.import_module("tileattn.torch.transformers")
