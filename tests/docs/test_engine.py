"""The program that serves a Llama gives each request the tokens that transformers give it."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", "5.4")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "engine", raising=False)
    return importlib.import_module("engine")


BLOCK = list(range(1, 17))
ASKED: list[tuple[list[int], int]] = [
    ([5], 4),
    ([*BLOCK, 20, 21], 9),
    (BLOCK * 3, 1),  # its last block is not shared: its last token must be read
    ([7, 8] * 9, 20),
    (BLOCK * 3, 6),
    ([*BLOCK, 20, 22], 12),
]


@pytest.mark.parametrize("slots", [1, 2, 6])
def test_requests_that_join_and_leave(engine: ModuleType, slots: int) -> None:
    assert engine.compare(engine.model_of(), ASKED, slots)


def test_prefixes_are_shared(engine: ModuleType) -> None:
    """A request shares pages of one that has ended, but not the block with its own last token."""
    server = engine.Engine(engine.model_of(), pages=8, slots=1)
    server.serve([engine.Request(*each) for each in ASKED])
    assert server.shared == 16 + 32 + 16
    assert server.pages.available() == 8


def test_drafts_that_are_right(engine: ModuleType) -> None:
    """A model that repeats tokens writes what its drafts say, and fewer steps do."""
    model = engine.model_of()
    with torch.no_grad():
        for layer in model.model.layers:  # the next token follows from the last one
            layer.self_attn.o_proj.weight.zero_()
    asked = [([3, 4], 40)]
    server = engine.Engine(model, 8, 1)
    request = engine.Request(*asked[0])
    server.serve([request])
    assert request.tokens == engine.alone(model, *asked[0])[0]
    assert server.drafted > 0
    assert server.steps == 40 - server.drafted


def test_a_request_that_is_too_long(engine: ModuleType) -> None:
    server = engine.Engine(engine.model_of(), pages=2, slots=2)
    with pytest.raises(ValueError, match="pages must be 3 for a request of 40 tokens"):
        server.serve([engine.Request([1, 2], 38)])


LARGEST = {torch.int8: 127, torch.float8_e4m3fn: 448}


def rounded(x: Any, dtype: Any) -> Any:
    """Quantise each token of each head, so that its largest element is the largest of ``dtype``."""
    descale = x.abs().amax(-1, keepdim=True) / LARGEST[dtype]
    stored = x / descale
    if dtype == torch.int8:
        stored = stored.round()
    return stored.to(dtype).double() * descale.double()


def reference_logits(
    model: Any, tokens: list[int], dtype: Any, nudge: float, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Read a whole text by the plain formula in float64 over rounded keys and values.

    Before they are rounded, keys and values change by a random factor from 1 - nudge to 1 + nudge.
    """

    def plain(_module: Any, q: Any, k: Any, v: Any, *_: Any, scaling: float, **__: Any) -> Any:
        k, v = (x * (1 + nudge * (2 * torch.rand(x.shape, generator=random) - 1)) for x in (k, v))
        k, v = (rounded(x, dtype).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q.double() @ k.mT * scaling
        future = torch.ones(scores.shape[-2:]).triu(1).bool()
        probabilities = scores.masked_fill(future, -torch.inf).softmax(-1)
        return (probabilities @ v).to(q.dtype).transpose(1, 2), None

    random = torch.Generator().manual_seed(0)
    llama = "transformers.models.llama.modeling_llama"
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(f"{llama}.eager_attention_forward", plain)
        model.set_attn_implementation("eager")
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_caches_of_8_bits(engine: ModuleType, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request gets the tokens that it gets alone, and that the formula gives on a rounded cache.

    Rounding errors of float32, here of about 2e-6, may change which number of 8 bits is the
    nearest. The best token must lead by more than such changes can take from it.
    """
    model = engine.model_of(seed=27)  # with clear leads
    requests = [engine.Request(*each) for each in ASKED]
    server = engine.Engine(model, 12, 3, dtype)
    server.serve(requests)
    assert server.shared > 0
    assert server.drafted > 0
    assert max(len(prompt) for prompt, _ in ASKED) > engine.CHUNK
    for (prompt, count), served in zip(ASKED, requests, strict=True):
        alone = engine.Request(prompt, count)
        engine.Engine(model, 4, 1, dtype).serve([alone])
        assert served.tokens == alone.tokens

        nudges = 0, 1e-5, -1e-5
        exact, *nudged = (
            reference_logits(model, served.tokens[:-1], dtype, nudge, monkeypatch)[-count:]
            for nudge in nudges
        )
        best = exact.topk(2)
        assert served.tokens[-count:] == best.indices[:, 0].tolist()
        moved = max((x - exact).abs().max() for x in nudged)
        assert (best.values[:, 0] - best.values[:, 1]).min() > 2 * moved


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_the_memory_of_caches_of_8_bits(engine: ModuleType, dtype: Any) -> None:
    """Pages have half the bytes of bfloat16; each token and head has 8 bytes of descales."""

    def memory(cache_dtype: Any) -> tuple[int, int]:
        caches = engine.Engine(model, 10, 2, cache_dtype).caches
        pages = sum(x.nbytes for cache, _ in caches for x in cache)
        return pages, sum(x.nbytes for _, descales in caches for x in descales.values())

    model = engine.model_of().bfloat16()
    (pages, none), (halved, descales) = memory(None), memory(dtype)
    assert none == 0
    assert halved * 2 == pages
    assert descales * model.config.head_dim == halved * 4


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_a_wrong_descale_is_noticed(
    engine: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = engine.attention

    def wrong(*given: Any, **options: Any) -> Any:
        return true(*given, **options | {name: options[name] * 0.9})

    monkeypatch.setattr(engine, "attention", wrong)
    assert not engine.compare(engine.model_of(), ASKED, 2, torch.int8)


@pytest.mark.parametrize("name", ["append_kv", "rope"])
def test_a_wrong_step_is_noticed(
    engine: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = getattr(engine, name)

    def wrong(*given: Any, **options: Any) -> Any:
        found = true(*given, **options)
        if name == "rope":
            return -found
        given[1].mul_(0.9)
        return found

    monkeypatch.setattr(engine, name, wrong)
    assert not engine.compare(engine.model_of(), ASKED, 2)
