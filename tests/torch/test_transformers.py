"""Models of transformers, made at random, beside their eager attention."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tileattn.errors import UnsupportedError  # noqa: E402 - PyTorch may be absent
from tileattn.torch.transformers import attention_forward, register  # noqa: E402 - as above

WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
LAYERS = {"num_hidden_layers": 2, "vocab_size": 64}
DECODER = WIDTH | LAYERS | {"num_key_value_heads": 2, "max_position_embeddings": 64}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
NO_DROPOUT = {"attention_dropout": 0.0}

DECODERS: dict[str, dict[str, Any]] = {
    "Llama": DECODER,
    "Mistral": DECODER | {"sliding_window": 5},
    "Qwen3": DECODER | {"head_dim": 16},
    "Gemma2": DECODER | {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    "Gemma3Text": DECODER | {"head_dim": 8, "sliding_window": 5},
    "GptOss": DECODER
    | {"head_dim": 8, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "n_positions": 64}
    | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
LENGTH = 11


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    register()
    return None


def pair(model_class: str, config: Any) -> tuple[Any, Any]:
    """Make a model with eager attention, and the same one with ours."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    eager = getattr(transformers, model_class)(config).eval()
    for parameter in eager.parameters():  # sinks and biases are 0 at first
        parameter.data += 0.05 * torch.randn_like(parameter)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("tileattn")
    assert ours.config._attn_implementation == "tileattn"
    return eager, ours


def decoder(name: str) -> tuple[Any, Any]:
    config = getattr(transformers, f"{name}Config")(**DECODERS[name], **ENDS)
    return pair(CLASSES.get(name, f"{name}ForCausalLM"), config)


def padding(side: str) -> Any:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if side == "left":
        mask[1, :4] = 0
    if side == "right":
        mask[1, -3:] = 0
    return mask


def agree(models: tuple[Any, Any], seen: Any, **inputs: Any) -> None:
    """Compare losses, what is seen of the first output, and the gradients of all parameters."""
    results = []
    for model in models:
        model.zero_grad()
        result = model(**inputs)
        first = result[1] if "labels" in inputs else result[0]
        first = first[seen]
        loss = result.loss if "labels" in inputs else first.cos().sum()
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((loss, first, grads))
    (eager_loss, eager_out, eager_grads), (loss, out, grads) = results
    assert grads.keys() == eager_grads.keys()
    pairs = {name: (found, eager_grads[name]) for name, found in grads.items()}
    pairs |= {"loss": (loss, eager_loss), "output": (out, eager_out)}
    for name, (found, expected) in pairs.items():
        assert (found - expected).norm() <= 2e-5 * expected.norm(), name


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, side: str) -> None:
    tokens, mask = torch.randint(2, 64, (2, LENGTH)), padding(side)
    labels = tokens.masked_fill(mask == 0, -100)
    inputs = {"input_ids": tokens, "labels": labels}
    if side != "none":
        inputs["attention_mask"] = mask
    agree(decoder(name), mask.bool(), **inputs)


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_generate_the_same_tokens(name: str) -> None:
    eager, ours = decoder(name)
    tokens, mask = torch.randint(2, 64, (2, LENGTH)), padding("left")
    given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = eager.generate(tokens, **given)
    assert torch.equal(ours.generate(tokens, **given), expected)


def test_a_static_cache_generates_the_same_tokens() -> None:
    eager, ours = decoder("Llama")
    tokens = torch.randint(2, 64, (2, LENGTH))
    given = {"max_new_tokens": 8, "do_sample": False, "attention_mask": padding("none")}
    expected = eager.generate(tokens, **given)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(ours.generate(tokens, **given, **static), expected)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_sequences(name: str) -> None:
    tokens = torch.randint(2, 64, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    models = decoder(name)
    agree(models, ..., input_ids=tokens, position_ids=positions)
    whole = models[1](input_ids=tokens, position_ids=positions).logits
    alone = models[1](input_ids=tokens[:, 5:]).logits
    torch.testing.assert_close(whole[:, 5:], alone)


def test_bfloat16() -> None:
    eager, ours = (model.bfloat16() for model in decoder("Llama"))
    tokens = torch.randint(2, 64, (2, LENGTH))
    exact = decoder("Llama")[0](tokens).logits
    errors = [(model(tokens).logits - exact).norm() for model in (ours, eager)]
    assert errors[0] <= 1.5 * errors[1]


def test_bert() -> None:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    models = pair("BertModel", transformers.BertConfig(**WIDTH, **LAYERS, **none))
    mask = padding("right")
    agree(models, mask.bool(), input_ids=torch.randint(2, 64, (2, LENGTH)), attention_mask=mask)


def test_modernbert_with_windows_of_its_own() -> None:
    config = transformers.ModernBertConfig(
        **(WIDTH | LAYERS | {"num_hidden_layers": 3}),
        local_attention=4,
        global_attn_every_n_layers=2,
        **ENDS,
        cls_token_id=2,
        sep_token_id=3,
    )
    mask = padding("right")
    tokens = torch.randint(2, 64, (2, LENGTH))
    agree(pair("ModernBertModel", config), mask.bool(), input_ids=tokens, attention_mask=mask)


def test_vit() -> None:
    config = transformers.ViTConfig(**WIDTH, num_hidden_layers=2, image_size=16, patch_size=4)
    pixels = torch.randn(2, 3, 16, 16)
    agree(pair("ViTModel", config), ..., pixel_values=pixels)


def test_t5_with_its_relative_bias() -> None:
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None)
    models = pair("T5ForConditionalGeneration", config)
    mask, tokens = padding("right"), torch.randint(2, 64, (2, LENGTH))
    labels = torch.randint(2, 64, (2, 7))
    agree(models, ..., input_ids=tokens, attention_mask=mask, labels=labels)
    eager, ours = models
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.generate(tokens, **given), eager.generate(tokens, **given))


def test_whisper_with_cross_attention() -> None:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = transformers.WhisperConfig(
        **(heads | sizes | ENDS),
        vocab_size=64,
        d_model=32,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=20,
        decoder_start_token_id=1,
        dropout=0.0,
    )
    features = torch.randn(2, 8, 20)
    labels = torch.randint(2, 64, (2, 7))
    models = pair("WhisperForConditionalGeneration", config)
    agree(models, ..., input_features=features, labels=labels)


def test_dropout_is_that_of_training() -> None:
    config = transformers.LlamaConfig(**DECODER, **ENDS, attention_dropout=0.5)
    _, ours = pair("LlamaForCausalLM", config)
    tokens = torch.randint(2, 64, (2, LENGTH))
    assert torch.equal(ours(tokens).logits, ours(tokens).logits)
    ours.train()
    torch.manual_seed(1)
    first = ours(tokens).logits
    assert not torch.equal(ours(tokens).logits, first)
    torch.manual_seed(1)
    assert torch.equal(ours(tokens).logits, first)


@pytest.mark.parametrize("name", ["output_attentions", "cache", "block_indices"])
def test_what_is_not_computed_is_refused(name: str) -> None:
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedError, match=f"{name} is"):
        attention_forward(torch.nn.Identity(), x, x, x, None, **{name: True})
