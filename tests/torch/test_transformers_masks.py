"""Masks that become options, compared with transformers' boolean masks."""

import inspect
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.4")

from transformers import masking_utils  # noqa: E402 - it may be absent

import tileattn.torch.transformers as bridge  # noqa: E402 - as above
from tileattn.errors import UnsupportedError  # noqa: E402 - as above
from tileattn.torch import transformers_masks  # noqa: E402 - as above

FUNCTIONS = {
    "causal": lambda _: masking_utils.causal_mask_function,
    "full": lambda _: masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function,
    "around": masking_utils.sliding_window_bidirectional_mask_function,
}
CREATE = {"causal": "create_causal_mask", "window": "create_sliding_window_causal_mask"}


def attended(mask: Any) -> Any:
    """Return which keys each query attends to, by attending to one-hot values."""
    batch, _, rows, keys = mask.shape
    q, k = torch.zeros(batch, 1, rows, 4), torch.zeros(batch, 1, keys, 4)
    v = torch.eye(keys).expand(batch, 1, keys, keys)
    return bridge.attention_forward(torch.nn.Identity(), q, k, v, mask)[0].transpose(1, 2) > 0


@given(
    name=st.sampled_from(sorted(FUNCTIONS)),
    window=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 9)),
    offsets=st.tuples(st.integers(0, 9), st.integers(0, 5)),
    padding=st.none() | st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=16),
)
def test_structured_masks_are_those_of_sdpa(
    name: str,
    window: int,
    sizes: tuple[int, int],
    offsets: tuple[int, int],
    padding: list[tuple[bool, bool]] | None,
) -> None:
    options: dict[str, Any] = dict(zip(("q_length", "kv_length"), sizes, strict=True))
    options |= {"batch_size": 2, "kv_offset": offsets[1], "mask_function": FUNCTIONS[name](window)}
    options["attention_mask"] = None if padding is None else torch.tensor(padding).T
    expected = masking_utils.sdpa_mask(**options, q_offset=offsets[0], allow_is_causal_skip=False)
    q_offset = torch.tensor(offsets[0])
    mask = bridge.make_mask(**options, q_offset=q_offset)
    q_offset += 3  # as a static cache does before its layers attend
    assert isinstance(mask, bridge.StructuredMask)
    assert torch.equal(attended(mask), expected)
    assert torch.equal(mask & True, expected)


def test_causal_masks_hide_what_a_cache_has_not_taken_yet() -> None:
    """No lengths are needed, though the padding mask is shorter than the cache."""
    options: dict[str, Any] = {"batch_size": 2, "q_length": 3, "kv_length": 9, "q_offset": 4}
    mask = bridge.make_mask(**options, attention_mask=torch.ones(2, 7, dtype=torch.bool))
    assert mask.options == {"window": (None, 0), "q_offset": 4}
    mask = bridge.make_mask(**options, attention_mask=torch.ones(2, 6, dtype=torch.bool))
    assert mask.options["kv_lengths"].tolist() == [6, 6]


@given(
    name=st.sampled_from(["causal", "window"]),
    window=st.integers(1, 9),
    starts=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12),
)
def test_packed_masks_separate_sequences(
    name: str, window: int, starts: list[tuple[bool, bool]]
) -> None:
    first, rows = torch.tensor(starts).T, torch.arange(len(starts))
    positions = rows - torch.where(first, rows, 0).cummax(1).values
    sequences = first.cumsum(1)
    apart = rows[:, None] - rows
    expected = (apart >= 0) & (sequences[:, :, None] == sequences[:, None])
    if name == "window":
        expected &= apart < window
    bridge.register()
    config = transformers.MistralConfig(sliding_window=window)
    config._attn_implementation = bridge.NAME
    embeddings = torch.zeros(2, len(starts), 1)
    create = getattr(masking_utils, CREATE[name])
    cache = "cache" if "cache" in inspect.signature(create).parameters else "past_key_values"
    mask = create(config, embeddings, None, position_ids=positions, **{cache: None})
    assert isinstance(mask, bridge.StructuredMask)
    assert torch.equal(attended(mask), expected[:, None])
    assert torch.equal(mask & True, expected[:, None])


def test_other_masks_are_booleans_for_attention() -> None:
    chunks = masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 2]))
    blocks = torch.tensor([[0, 0, 1, 2, 2], [0, 1, 1, 2, 2]])

    def same_block(b: Any, _h: Any, i: Any, j: Any) -> Any:
        return blocks[b, i] == blocks[b, j]

    either = masking_utils.or_masks(masking_utils.causal_mask_function, same_block)
    for function, use_vmap in itertools.product((chunks, same_block, either), (False, True)):
        options: dict[str, Any] = {"batch_size": 2, "q_length": 5, "kv_length": 5}
        options |= {"mask_function": function, "use_vmap": use_vmap}
        mask = bridge.make_mask(**options)
        expected = masking_utils.sdpa_mask(**options, allow_is_causal_skip=False)
        assert torch.equal(mask.options["mask"], expected)
        assert torch.equal(attended(mask), expected)
        assert torch.equal(mask & True, expected)


class AddingConfig:
    """Config of a model that adds masks to scores."""


@pytest.fixture
def adds(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the argument that makes a mask of numbers."""
    monkeypatch.setattr(transformers_masks, "ADDITIVE", {AddingConfig})
    return {"config": AddingConfig()}


@pytest.mark.parametrize("use_vmap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", ["causal", "chunks"])
def test_masks_may_be_the_numbers_of_eager_attention(
    function: str, dtype: Any, use_vmap: bool, adds: dict[str, Any]
) -> None:
    functions = {
        "causal": masking_utils.causal_mask_function,
        "chunks": masking_utils.chunked_causal_mask_function(3, torch.tensor([0, 2])),
    }
    padding = torch.tensor([[False, True, True, True], [True, True, True, True]])
    options: dict[str, Any] = {"batch_size": 2, "q_length": 3, "kv_length": 4, "q_offset": 1}
    options |= {"attention_mask": padding, "dtype": dtype, "use_vmap": use_vmap}
    options["mask_function"] = functions[function]
    mask, expected = bridge.make_mask(**options, **adds), masking_utils.eager_mask(**options)
    assert mask.dtype == expected.dtype == dtype
    assert torch.equal(attended(mask), expected == 0)
    assert torch.equal(mask + 0, expected)
    assert torch.equal(mask[:, :, 1:], expected[:, :, 1:])
    scores = torch.randn(2, 5, 3, 4, dtype=dtype)
    assert torch.equal(scores + mask, scores + expected)
    assert torch.equal(scores.clone().add_(mask), scores + expected)


@pytest.mark.parametrize("use", ["add", "add in place", "write", "multiply", "cast", "join"])
def test_booleans_are_not_added_to_scores(use: str) -> None:
    mask = bridge.make_mask(batch_size=2, q_length=3, kv_length=4)
    uses: dict[str, Any] = {
        "add": lambda: torch.randn(2, 5, 3, 4) + mask,
        "add in place": lambda: torch.randn(2, 5, 3, 4).add_(mask),
        "write": lambda: torch.randn(2, 1, 3, 4).copy_(mask),
        "multiply": lambda: mask * -1e9,
        "cast": lambda: mask.to(torch.bfloat16),
        "join": lambda: torch.cat([mask, torch.zeros(2, 1, 3, 1)], dim=-1),
    }
    with pytest.raises(UnsupportedError, match=r"computes with the attention mask.*'eager'"):
        uses[use]()


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("function", ["causal", "chunks"])
def test_what_is_written_to_a_mask_counts(
    function: str, inference: bool, numbers: bool, adds: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"batch_size": 2, "q_length": 5, "kv_length": 5}
    if function == "chunks":
        options["mask_function"] = masking_utils.chunked_causal_mask_function(
            2, torch.tensor([0, 0])
        )
    with torch.inference_mode(inference):
        mask = bridge.make_mask(**options, **adds if numbers else {})
        before = attended(mask)
        assert before[:, :, 0, 1].logical_not().all()
        mask[:, :, 0, 1] = 0.0 if numbers else True
        after = attended(mask)
    assert after[:, :, 0, 1].all()
    changed = torch.zeros(5, 5, dtype=torch.bool)
    changed[0, 1] = True
    assert torch.equal(after ^ before, changed.expand(2, 1, 5, 5))
