"""Models with layers that do not use transformers' attention interface."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.4")

from transformers import masking_utils  # noqa: E402 - it may be absent
from transformers.modeling_utils import (  # noqa: E402 - as above
    ALL_ATTENTION_FUNCTIONS,
    PreTrainedModel,
)

import tileattn.torch.transformers as bridge  # noqa: E402 - as above
from tileattn.errors import UnsupportedError  # noqa: E402 - as above

pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    bridge.register()


# --- what is refused when the model is made -------------------------------------------------------

WIDTH = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
VISION = {"num_hidden_layers": 1, "image_size": 16, "patch_size": 4} | WIDTH
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "BloomForCausalLM": ({"hidden_size": 32, "n_layer": 1, "n_head": 4}, "BloomAttention"),
    "MptForCausalLM": ({"d_model": 32, "n_layers": 1, "n_heads": 4}, "MptAttention"),
    "DebertaV2Model": (WIDTH | {"num_hidden_layers": 1}, "DisentangledSelfAttention"),
    "LongformerModel": (WIDTH | {"num_hidden_layers": 1}, "LongformerSelfAttention"),
    "GPTJForCausalLM": (
        {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4},
        "GPTJAttention",
    ),
    "GitForCausalLM": (
        WIDTH | {"num_hidden_layers": 1, "vision_config": VISION},
        "GitSelfAttention",
    ),
    "SamModel": ({"vision_config": VISION | {"output_channels": 8}}, "SamVisionAttention"),
}


def config_of(name: str, **options: Any) -> Any:
    made = getattr(transformers, name).config_class
    return made(**({"vocab_size": 64} if "Sam" not in name else {}) | options)


@pytest.mark.parametrize("name", REFUSED)
def test_models_with_attention_of_their_own_are_refused_by_name(name: str) -> None:
    options, layer = REFUSED[name]
    made = getattr(transformers, name)
    sentence = f"{name[:3]}.* does not support attn_implementation='tileattn'.*{layer}.*'eager'"
    with pytest.raises(UnsupportedError, match=sentence):
        made._from_config(config_of(name, **options), attn_implementation="tileattn")
    model = made._from_config(config_of(name, **options), attn_implementation="eager")
    before = [part.config._attn_implementation for part in parts_of(model)]
    with pytest.raises(UnsupportedError, match=sentence):
        model.set_attn_implementation("tileattn")
    assert [part.config._attn_implementation for part in parts_of(model)] == before


def parts_of(model: Any) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, PreTrainedModel)]


def test_layers_that_select_keys_are_refused_by_the_argument_they_pass() -> None:
    with pytest.raises(UnsupportedError, match=r"SelectingModel .* passes indices, .*'eager'"):
        SelectingModel._from_config(MixedConfig(), attn_implementation="tileattn")


def test_other_parts_of_a_model_may_have_another_implementation() -> None:
    """The vision tower of GIT uses the interface, its text decoder does not."""
    options, _ = REFUSED["GitForCausalLM"]
    model = transformers.GitForCausalLM(config_of("GitForCausalLM", **options))
    model.set_attn_implementation({"vision_config": "tileattn", "": "eager"})
    names = {part.config._attn_implementation for part in parts_of(model)}
    assert names == {"eager", "tileattn"}


def test_other_implementations_are_not_looked_at() -> None:
    options, _ = REFUSED["BloomForCausalLM"]
    model = transformers.BloomForCausalLM(config_of("BloomForCausalLM", **options))
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("eager")


# --- layers that use the mask as numbers ----------------------------------------------------------


class MixedConfig(transformers.PreTrainedConfig):  # type: ignore[name-defined,misc]  # untyped
    """Config of a user's model."""

    model_type = "mixed"
    width = 16


class InterfaceAttention(torch.nn.Module):  # type: ignore[name-defined,misc]  # untyped
    """A layer that uses the interface."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.project = torch.nn.Linear(config.width, 3 * config.width)

    def forward(self, x: Any, mask: Any) -> Any:
        q, k, v = self.project(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, dim=-1)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, added)
        return x + attend(self, q, k, v, mask, scaling=0.5)[0].flatten(2)


def added(_module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float) -> tuple[Any, None]:
    """Compute attention that adds the mask to scores."""
    s = q @ k.mT * scaling
    p = (s if mask is None else s + mask).softmax(-1)
    return (p @ v).transpose(1, 2), None


class AddingAttention(InterfaceAttention):
    """A layer that computes attention itself, and adds the mask to scores."""

    def forward(self, x: Any, mask: Any) -> Any:
        q, k, v = self.project(x).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, dim=-1)
        return x + added(self, q, k, v, mask, scaling=0.5)[0].flatten(2)


def distances(mask: Any) -> Any:
    rows, keys = map(torch.arange, mask.shape[-2:])
    return -0.1 * (rows[:, None] - keys).abs()


# What a model may do with a mask of numbers before a layer takes it.
USES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda mask: mask,
    "add": lambda mask: mask + distances(mask),
    "add to": lambda mask: distances(mask) + mask,
    "subtract": lambda mask: distances(mask) - (0 - mask),
    "multiply": lambda mask: 0.9 * mask,
    "cast": lambda mask: mask.to(torch.float64).float(),
    "cast like it": lambda mask: mask + distances(mask).to(mask.dtype),
    "concatenate": lambda mask: torch.cat([mask[..., :2], (-mask)[..., 2:].neg()], dim=-1),
    "slice": lambda mask: mask[:, :, :, : mask.shape[-1]],
    "expand": lambda mask: mask.expand(-1, 2, -1, -1),
    "fill": lambda mask: mask.masked_fill(distances(mask) < -0.65, -1e9),
    "clamp": lambda mask: mask.clamp(min=-1e4),
}


class MixedModel(PreTrainedModel):  # type: ignore[misc]  # untyped
    """A decoder with layers of both kinds."""

    config_class = MixedConfig
    _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(20, config.width)
        self.first, self.second = InterfaceAttention(config), AddingAttention(config)
        self.post_init()

    def forward(self, tokens: Any, attention_mask: Any, use: str) -> Any:
        x = self.embed(tokens)
        create = masking_utils.create_causal_mask
        mask = USES[use](create(self.config, x, attention_mask, past_key_values=None))
        return self.second(self.first(x, mask), mask)


class SelectingAttention(InterfaceAttention):
    """A layer that passes the keys each query selects."""

    def forward(self, x: Any, mask: Any) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, added)
        selected = {"scaling": 0.5, "indices": mask.argsort(-1)[..., :2]}
        return attend(self, x, x, x, mask, dropout=0.0, **selected)[0]


class SelectingModel(MixedModel):
    """A model with such a layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.second = SelectingAttention(config)


def mixed_model() -> Any:
    torch.manual_seed(0)
    model = MixedModel._from_config(MixedConfig(), attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


COMPILED = ("nothing", "add", "cast like it")


@pytest.mark.parametrize(
    ("use", "compiled"), [*((use, False) for use in USES), *((use, True) for use in COMPILED)]
)
def test_masks_that_models_use_as_numbers(use: str, compiled: bool) -> None:
    """Layers that add the mask agree with eager attention, even if the model changes the mask."""
    model = mixed_model()
    tokens = torch.randint(20, (2, 9))
    padding = torch.ones_like(tokens)
    padding[0, :2] = 0
    expected = model(tokens, padding, use)
    with pytest.warns(UserWarning, match=r"AddingAttention computes attention itself.*'tileattn'"):
        model.set_attn_implementation("tileattn")
    run = model
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(model, backend="eager", fullgraph=True)
    found = run(tokens, padding, use)
    attended = padding.bool()  # queries of padding attend to no key
    torch.testing.assert_close(found[attended], expected[attended])
    other = tokens.clone()
    other[0, :2] = (tokens[0, :2] + 1) % 20  # padding
    other[1, -1] = (tokens[1, -1] + 1) % 20  # a later token
    attended[1, -1] = False
    assert torch.equal(found[attended], run(other, padding, use)[attended])


# --- layers that use the mask as booleans ---------------------------------------------------------


class BooleanConfig(MixedConfig):
    """Config of a model that takes boolean masks, like ``"sdpa"``."""


class BooleanModel(PreTrainedModel):  # type: ignore[misc]  # untyped
    """A decoder whose layers use the interface."""

    config_class = BooleanConfig
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(20, config.width)
        self.layer = InterfaceAttention(config)
        self.post_init()

    def forward(self, tokens: Any, attention_mask: Any, use: Any) -> Any:
        x = self.embed(tokens)
        # Another mask beside it, lest transformers omit it for sdpa.
        apart = masking_utils.sliding_window_overlay(5)
        create = masking_utils.create_causal_mask
        options = {"past_key_values": None, "and_mask_function": apart}
        return self.layer(x, use(create(self.config, x, attention_mask, **options)))


BOOLEAN_USES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda mask: mask,
    "and": lambda mask: mask & (distances(mask) > -0.35),
    "or": lambda mask: mask | (distances(mask) == 0),
    "not": lambda mask: ~(mask.logical_not()),
    "choose": lambda mask: torch.where(mask, distances(mask), -1e9),
    "fill": lambda mask: distances(mask).expand(2, 1, -1, -1).masked_fill(~mask, -1e9),
    "slice": lambda mask: mask[:, :, :, : mask.shape[-1]],
}


@pytest.mark.parametrize("use", BOOLEAN_USES)
def test_masks_that_models_use_as_booleans(use: str) -> None:
    torch.manual_seed(0)
    model = BooleanModel._from_config(BooleanConfig(), attn_implementation="sdpa").eval()
    tokens = torch.randint(20, (2, 9))
    padding = torch.ones_like(tokens)
    padding[0, -2:] = 0
    expected = model(tokens, padding, BOOLEAN_USES[use])
    model.set_attn_implementation("tileattn")
    torch.testing.assert_close(model(tokens, padding, BOOLEAN_USES[use]), expected)


def test_models_that_compute_with_booleans_are_refused() -> None:
    """With sdpa their attention would be wrong, too."""
    model = BooleanModel._from_config(BooleanConfig(), attn_implementation="tileattn")
    tokens = torch.randint(20, (2, 9))
    with pytest.raises(UnsupportedError, match="computes with the attention mask"):
        model(tokens, torch.ones_like(tokens), USES["add"])
