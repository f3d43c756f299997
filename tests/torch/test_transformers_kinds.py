"""One model of each kind of attention and mask that transformers has, beside eager attention.

They must agree; later tokens must change nothing before them, and padding nothing at all.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.23")  # where all these models are

from tests.torch.test_transformers import (  # noqa: E402 - it may be absent
    LENGTH,
    agree,
    padding,
)
from tileattn.torch.transformers import register  # noqa: E402 - as above

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "embedding_size", "n_embd", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), 0.0),
    **dict.fromkeys(("attention_dropout", "activation_dropout", "dropout_rate"), 0.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **{"vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"sliding_window": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 1},
}
TEXT = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "vocab_size")} | {
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"sliding_window": 4, "max_position_embeddings": 64, "pad_token_id": 0},
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2} | {
    **{"num_attention_heads": 4, "image_size": 16, "patch_size": 8, "num_channels": 3},
}
IMAGE, IMAGE_TOKENS = 61, 4

DECODERS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"use_sliding_window": True, "max_window_layers": 1},
    "Phi3ForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Cohere2ForCausalLM": {},
    "StableLmForCausalLM": {},
    "Starcoder2ForCausalLM": {},
    "GraniteForCausalLM": {},
    "GPTNeoXForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "BioGptForCausalLM": {},
    "GPTBigCodeForCausalLM": {},
    "MixtralForCausalLM": {},
    "Exaone4ForCausalLM": {},
    "DogeForCausalLM": {},
    "DeepseekV4ForCausalLM": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "ModernBertDecoderForCausalLM": {},
    "Lfm2ForCausalLM": {},
    "BertLMHeadModel": {"is_decoder": True},
    "BigBirdPegasusForCausalLM": {},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "RobertaForMaskedLM": {},
    "ElectraForMaskedLM": {},
    "DistilBertForMaskedLM": {"hidden_dim": 48, "dim": 32, "n_layers": 2},
    "AlbertForMaskedLM": {},
    "EsmForMaskedLM": {"mask_token_id": 5, "position_embedding_type": "rotary"},
    "XLMRobertaForMaskedLM": {},
    "EuroBertForMaskedLM": {},
}
PAIRS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": {},
    "MarianMTModel": {},
    "M2M100ForConditionalGeneration": {},
    "BigBirdPegasusForConditionalGeneration": {},
    "PegasusXForConditionalGeneration": {"block_size": 4, "num_global_tokens": 2},
    "LongT5ForConditionalGeneration": {"local_radius": 3},
    "UMT5ForConditionalGeneration": {},
    "SwitchTransformersForConditionalGeneration": {},
    "T5GemmaForConditionalGeneration": {"encoder": TEXT, "decoder": TEXT},
}
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "PaliGemmaForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "gemma2"},
        "vision_config": VISION | {"model_type": "siglip_vision_model", "projection_dim": 32},
        **{"image_token_index": IMAGE, "projection_dim": 32, "hidden_size": 32},
    },
    "Gemma3ForConditionalGeneration": {
        "text_config": TEXT,
        "vision_config": VISION,
        **{"image_token_index": IMAGE, "mm_tokens_per_image": IMAGE_TOKENS},
    },
}
CONFIGS = DECODERS | ENCODERS | PAIRS | WITH_IMAGES

# Layers of these models that compute attention themselves, which making the model warns of.
OWN = {
    "BigBirdPegasusForConditionalGeneration": "BigBirdPegasusSelfAttention",
    "PegasusXForConditionalGeneration": "PegasusXGlobalLocalAttention",
    "LongT5ForConditionalGeneration": "LongT5LocalAttention",
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The models are so small that more threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    register()
    yield
    torch.set_num_threads(before)


def made(name: str, implementation: str) -> Any:
    """Make a model; models of one name have the same parameters."""
    model = getattr(transformers, name)
    known, changes = model.config_class, CONFIGS[name]
    sizes = {} if {"text_config", "encoder"} & changes.keys() else SIZES
    options = {n: x for n, x in sizes.items() if hasattr(known, n) or hasattr(known(), n)}
    torch.manual_seed(0)
    options |= {"decoder_start_token_id": 1} if name in PAIRS else {}
    found = model._from_config(known(**options | changes), attn_implementation=implementation)
    for parameter in found.parameters():  # sinks and biases are 0 at first
        parameter.data += 0.05 * torch.randn_like(parameter)
    return found.eval()


@cache
def both(name: str) -> tuple[Any, Any]:
    """Make a model with tileattn and one with eager attention."""
    if name not in OWN:
        return made(name, "tileattn"), made(name, "eager")
    with pytest.warns(UserWarning, match="computes attention itself") as found:
        ours = made(name, "tileattn")
    assert any(str(each.message).startswith(OWN[name]) for each in found)
    return ours, made(name, "eager")


def inputs_of(name: str, side: str) -> dict[str, Any]:
    torch.manual_seed(1)
    tokens, mask = torch.randint(3, 60, (2, LENGTH)), padding(side)
    given = {"input_ids": tokens} | ({} if side == "none" else {"attention_mask": mask})
    if name in PAIRS:
        return given | {"labels": torch.randint(3, 60, (2, 7))}
    after_padding = mask * torch.roll(mask, 1, 1)
    given["labels"] = tokens.masked_fill(after_padding == 0, -100)
    if name in WITH_IMAGES:
        tokens[:, 4 : 4 + IMAGE_TOKENS] = IMAGE
        given["pixel_values"] = torch.randn(2, 3, 16, 16)
        given["token_type_ids"] = (tokens == IMAGE).long()
    return given


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_models_agree_with_eager_attention(name: str, side: str) -> None:
    agree(*both(name), 2e-5, **inputs_of(name, side))


# The compressed keys of DeepSeek V4 are means over padding, too, with eager attention as well.
@pytest.mark.parametrize("name", [name for name in CONFIGS if "DeepseekV4" not in name])
def test_padding_changes_nothing(name: str) -> None:
    model = both(name)[0]
    for side in ("left", "right"):
        inputs = inputs_of(name, side)
        hidden = inputs["attention_mask"] == 0
        other = {**inputs, "input_ids": inputs["input_ids"].masked_fill(hidden, 7)}
        first, second = (model(**each).logits for each in (inputs, other))
        if name not in PAIRS:
            first, second = first[~hidden], second[~hidden]
        torch.testing.assert_close(first, second)


@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
def test_later_tokens_change_nothing(name: str) -> None:
    model, inputs = both(name)[0], inputs_of(name, "left")
    tokens = "labels" if name in PAIRS else "input_ids"
    other = {**inputs, tokens: inputs[tokens].clone()}
    last = -2 if name in PAIRS else -1  # decoders of pairs get labels that are shifted
    other[tokens][:, last] = (inputs[tokens][:, last] + 1) % 60
    first, second = (model(**each).logits[:, :-1] for each in (inputs, other))
    kept = slice(None) if name in PAIRS else inputs["attention_mask"][:, :-1].bool()
    torch.testing.assert_close(first[kept], second[kept])


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "BartForConditionalGeneration"])
def test_beam_search_finds_the_same_tokens(name: str) -> None:
    given = inputs_of(name, "left") | {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    del given["labels"]
    ours, theirs = (model.generate(**given) for model in both(name))
    assert torch.equal(ours, theirs)
