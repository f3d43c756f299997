"""flash_attn's function that writes to a cache, under autograd and compilers."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - PyTorch may be absent
from torch.utils._pytree import tree_map  # noqa: E402 - as above

import tileattn  # noqa: E402 - as above
from tests.torch.graphs import graphs_of  # noqa: E402 - as above
from tileattn.errors import UnsupportedError  # noqa: E402 - as above
from tileattn.testing import assert_attention_close, error_bound  # noqa: E402 - as above
from tileattn.torch import flash_attn  # noqa: E402 - as above

flash_attn_with_kvcache: Any = flash_attn.flash_attn_with_kvcache  # called with *caches
HQ, HKV, D, CAPACITY = 4, 2, 16, 24
TABLES = torch.randn(CAPACITY + 1, 4, generator=torch.Generator().manual_seed(3)).double()


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def new_tokens(N: int, seed: int) -> Any:
    return drawn((2, N, HQ, D), (2, N, HKV, D), (2, N, HKV, D), seed=seed)


def new_caches() -> Any:
    return drawn((2, 2, CAPACITY, HKV, D))[0]


class Ignored(TorchDispatchMode):  # type: ignore[misc]  # untyped
    """A mode that sends calls through PyTorch's dispatcher."""

    def __torch_dispatch__(self, f: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


# --- autograd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("way", ["eager", "dispatched", "compiled", "inference"])
def test_a_graph_that_needs_what_was_overwritten_says_so(way: str, written: int) -> None:
    caches = [x.clone() for x in new_caches()]  # views of one tensor share its version
    q, k, v = new_tokens(3, 1)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    earlier = (caches[written] * weight).sum()

    def append() -> Any:
        with torch.no_grad():
            return flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=[3, 7])

    before = caches[written]._version
    if way == "dispatched":
        with Ignored():
            append()
    elif way == "compiled":
        torch._dynamo.reset()
        torch.compile(append, backend="aot_eager", fullgraph=True)()
    elif way == "inference":
        with torch.inference_mode():
            append()
    else:
        append()
    assert torch.equal(caches[0][1, 7:10], k[1])
    assert caches[written]._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        earlier.backward()


def test_a_call_that_only_reads_leaves_the_version() -> None:
    caches = new_caches()
    before = caches._version
    flash_attn_with_kvcache(new_tokens(3, 1)[0], *caches, cache_seqlens=[3, 7])
    assert caches._version == before


def test_caches_made_in_inference_mode_are_written() -> None:
    with torch.inference_mode():
        caches = new_caches()
        q, k, v = new_tokens(1, 1)
        flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=5)
        assert torch.equal(caches[1, :, 5:6], v)


# --- compilers ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("lengths", ["tensor", "number"])
@pytest.mark.parametrize("rotary", [False, True])
def test_a_compiled_loop_of_calls_is_few_graphs(lengths: str, rotary: bool) -> None:
    tables = (TABLES.cos(), TABLES.sin()) if rotary else (None, None)

    def step(caches: Any, q: Any, k: Any, v: Any, n: Any) -> Any:
        options = {"causal": True, "window_size": (9, 0), "return_softmax_lse": True}
        return flash_attn_with_kvcache(q + 0, *caches, k, v, *tables, cache_seqlens=n, **options)

    call: Any = step
    fast, graphs = graphs_of(step, fullgraph=True)
    ours, theirs = new_caches(), new_caches()
    for n in range(0, 20, 2):
        tokens = new_tokens(2, n)
        at = n if lengths == "number" else torch.tensor([n, 18 - n], dtype=torch.int32)
        found, expected = fast(ours, *tokens, at), call(theirs, *tokens, at)
        for x, y in zip((*found, ours), (*expected, theirs), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert len(graphs) == (1 if lengths == "tensor" else 2)


@pytest.mark.parametrize("paged", [False, True])
def test_the_operator_keeps_pytorchs_rules(paged: bool) -> None:
    q, k, v = new_tokens(3, 1)
    caches = [x.reshape(8, 6, HKV, D) if paged else x for x in new_caches()]
    table = torch.arange(8).view(2, 4) if paged else None
    tables, lengths = (TABLES.cos(), TABLES.sin()), torch.tensor([3, 9])
    mask = torch.ones(1, 1, 1, CAPACITY, dtype=torch.bool)
    options = mask, None, torch.zeros(HQ), 0.3, None, 9, 0, True
    inputs = (q, *caches, k, v, *tables, lengths, table, *options)
    torch.library.opcheck(torch.ops.tileattn.append_and_attend.default, inputs)


# --- what it computes -----------------------------------------------------------------------------


@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_keys_before_the_first_do_not_count(paged: bool, appended: bool) -> None:
    caches = new_caches()
    q, k, v = new_tokens(3, 1)
    lengths, leftpad = torch.tensor([5, 14]), torch.tensor([3, 9])
    whole = [x.clone() for x in caches]
    given: dict[str, Any] = {"block_table": [[0, 1, 2, 3], [4, 5, 6, 7]]} if paged else {}
    rows = [x.reshape(8, 6, HKV, D) for x in caches] if paged else caches
    if appended:
        given |= {"k": k, "v": v}
        for old, x in zip(whole, (k, v), strict=True):
            for b, n in enumerate(lengths):
                old[b, n : n + 3] = x[b]
    out, lse = flash_attn_with_kvcache(
        q,
        *rows,
        cache_seqlens=lengths,
        cache_leftpad=leftpad,
        causal=True,
        return_softmax_lse=True,
        **given,
    )
    for x, y in zip(rows, whole, strict=True):
        assert torch.equal(x.reshape(y.shape), y)
    arrays = [x.transpose(1, 2).numpy() for x in (q, *whole)]
    options = {
        "kv_lengths": (lengths + (3 if appended else 0)).numpy(),
        "mask": (torch.arange(CAPACITY) >= leftpad[:, None, None, None]).numpy(),
        "causal": True,
    }
    found = tileattn.Attention(out.transpose(1, 2).numpy(), lse.numpy())
    expected = tileattn.reference.forward(*arrays, **options)
    assert_attention_close(found, expected, error_bound(*arrays, **options))


def test_what_needs_a_gradient_is_refused() -> None:
    q, k, v = new_tokens(3, 1)
    caches = new_caches()
    given = {"q": q, "k_cache": caches[0], "v_cache": caches[1], "k": k, "v": v}
    given |= {"rotary_cos": TABLES.cos(), "rotary_sin": TABLES.sin()}
    given |= {"alibi_slopes": torch.ones(HQ), "learnable_sink": torch.ones(HQ)}
    before = caches.clone()
    for name, x in given.items():
        changed = given | {name: x.detach().requires_grad_()}
        with pytest.raises(UnsupportedError, match=f"{name} requires a gradient"):
            flash_attn_with_kvcache(**changed, cache_seqlens=3)
        with torch.no_grad():
            flash_attn_with_kvcache(**{**changed, "k": None, "v": None}, cache_seqlens=3)
    assert torch.equal(caches, before)


def test_caches_that_are_computed_when_they_are_read_are_refused() -> None:
    caches = new_caches()
    q, k, v = new_tokens(3, 1)
    negated = torch._neg_view(caches[0])
    with pytest.raises(UnsupportedError, match="k_cache must hold its elements in memory"):
        flash_attn_with_kvcache(q, negated, caches[1], k, v, cache_seqlens=3)
    assert torch.equal(caches, new_caches())


class Wrapped(torch.Tensor):  # type: ignore[misc,name-defined]  # PyTorch is untyped here
    """Keeps its elements in another tensor, and forwards operators to it."""

    @staticmethod
    def __new__(cls: Any, whole: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype)

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole = whole

    @classmethod
    def __torch_dispatch__(cls, f: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def inner(x: Any) -> Any:
            return x.whole if isinstance(x, Wrapped) else x

        return f(*tree_map(inner, args), **tree_map(inner, kwargs or {}))


def test_tensors_without_memory_of_their_own_see_the_operators() -> None:
    ours, theirs = new_caches(), new_caches()
    q, k, v = new_tokens(3, 1)
    expected = flash_attn_with_kvcache(q, *theirs, k, v, cache_seqlens=3)
    given = [Wrapped(x.clone()) for x in (q, *ours, k, v)]
    found = flash_attn_with_kvcache(*given, cache_seqlens=3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for x, y in zip(given[1:3], theirs, strict=True):
        assert torch.equal(x.whole, y)
    found = flash_attn_with_kvcache(*given[:3], cache_seqlens=6)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_batches_of_torch_vmap_are_read_and_not_written() -> None:
    q, k, v = new_tokens(3, 1)
    caches = torch.stack([new_caches(), new_caches() + 1], 1)

    def f(caches: Any, **new: Any) -> Any:
        return flash_attn_with_kvcache(q, *caches, cache_seqlens=5, **new)

    each = torch.stack([f(caches[:, n]) for n in range(2)])
    torch.testing.assert_close(torch.vmap(f, 1)(caches), each, rtol=0, atol=0)
    before = caches.clone()
    with pytest.raises(UnsupportedError, match=r"does not append keys under torch\.vmap"):
        torch.vmap(lambda x: f(x, k=k, v=v), 1)(caches)
    assert torch.equal(caches, before)
