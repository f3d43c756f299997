"""PyTorch's tensors on a GPU: results, streams, memory, graphs and compilers."""

import gc
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.on_gpu import needs_gpu
from tileattn import Attention, BlockMask, Gradients, reference
from tileattn.testing import assert_attention_close, error_bound

torch = pytest.importorskip("torch")

from tileattn.torch import (  # noqa: E402 - PyTorch may be absent
    attention,
    scaled_dot_product_attention,
    sdpa,
)
from tileattn.torch.flash_attn import (  # noqa: E402 - as above
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tileattn.torch.operators import INPUTS  # noqa: E402 - as above
from tileattn.torch.tensors import array_of  # noqa: E402 - as above

pytestmark = [
    *needs_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
    pytest.mark.usefixtures("one_blas_thread"),
]

# B, Hq, Hkv, Nq, Nk, D
SIZES = (2, 4, 2, 67, 131, 64)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LONG = 200_000_000  # cycles: 0.1 s


def drawn(
    dtype: Any = torch.float16, sizes: tuple[int, ...] = SIZES, seed: int = 0, device: Any = "cuda"
) -> list[Any]:
    """Draw q, k and v, which need gradients, and dout."""
    B, Hq, Hkv, Nq, Nk, D = sizes
    shapes = (B, Hq, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, D), (B, Hq, Nq, D)
    rng = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def at_host(x: Any) -> Any:
    """Give arrays of the host for tensors."""
    if isinstance(x, tuple):
        return tuple(map(at_host, x))
    return array_of(x.detach().cpu()) if isinstance(x, torch.Tensor) else x


def both(given: list[Any], **options: Any) -> tuple[Any, ...]:
    """Run both passes; give out, dq, dk and dv."""
    *tensors, dout = given
    out = attention(*tensors, **options)
    return out, *torch.autograd.grad(out, tensors, dout)


def same(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def check(given: list[Any], **options: Any) -> None:
    """Compare both passes with the oracle."""
    q, k, v, dout = given
    learned = {name: options[name] for name in ("bias", "sinks") if name in options}
    aux = [x for x in options.get("aux", ()) if x.is_floating_point()]
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert out.is_cuda
    needed = [q, k, v, *learned.values(), *aux]
    dq, dk, dv, *others = torch.autograd.grad(out, needed, dout)
    named = dict(zip(learned, others, strict=False))
    daux = (*others[len(learned) :], *[None] * (len(options.get("aux", ())) - len(aux)))
    grads = Gradients(dq, dk, dv, named.get("bias"), named.get("sinks"), daux or None)
    hold(given, (out, lse), grads, **options)


def hold(given: list[Any], attention: tuple[Any, Any], grads: Gradients, **options: Any) -> None:
    """Compare results with the oracle; lse may be None."""
    rows, there = list(map(at_host, given)), {name: at_host(x) for name, x in options.items()}
    bounds = error_bound(*rows, **there)
    found, expected = Attention(*map(at_host, attention)), reference.forward(*rows[:3], **there)
    names = [name for name, x in found._asdict().items() if x is not None]
    assert_attention_close(found, expected, bounds, names=names)
    expected_grads = reference.backward(rows[3], *rows[:3], **there)
    grads = Gradients(*map(at_host, (*grads, grads.daux)))
    assert_attention_close(grads, expected_grads, bounds)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: Any) -> None:
    check(drawn(dtype), causal=True)


def relative(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any, shift: Any) -> Any:
    del b
    return s + table[h, abs(i - j)] * shift[h]


def _options() -> dict[str, dict[str, Any]]:
    """Make the options on the GPU, with tensors of any strides."""
    B, Hq, _, Nq, Nk, _ = SIZES
    rng = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=rng).cuda()

    mask = (normal(Nk, Nq) > 0).T
    return {
        "bias": {"bias": normal(Hq, Nq, Nk).requires_grad_(), "softcap": 5.0},
        "mask": {"mask": mask.expand(B, 1, Nq, Nk), "sinks": normal(Hq).requires_grad_()},
        "slopes": {"alibi_slopes": normal(Hq).abs(), "window": (30, 5)},
        "lengths": {"kv_lengths": torch.tensor([Nk, 40], dtype=torch.int32).cuda()},
        "dropout": {"dropout_p": 0.3, "seed": 7, "kv_lengths": torch.tensor([Nk, 40])},
        "blocks": {"block_mask": BlockMask(np.tri(5, 9, dtype=np.bool_), (16, 16))},
        "function": {
            "score_mod": relative,
            "aux": (normal(Hq, Nk).requires_grad_(), torch.arange(Hq).cuda()),
        },
    }


OPTIONS = ("bias", "mask", "slopes", "lengths", "dropout", "blocks", "function")


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    check(drawn(), **_options()[name])


def _strided(x: Any) -> Any:
    """Copy a tensor into every second row of a buffer of tokens, heads and columns."""
    B, H, N, D = x.shape
    whole = torch.zeros(B, 2 * N + 1, H, D + 8, dtype=x.dtype, device=x.device)
    view = whole[:, 1::2, :, 8:].transpose(1, 2)
    view.copy_(x)
    return view


def test_strides_offsets_and_expanded_tensors() -> None:
    q, k, v, dout = drawn()
    strided = [_strided(x.detach()).requires_grad_() for x in (q, k, v)]
    check([*strided, _strided(dout)], causal=True)
    one = [x.detach()[:1, :1].expand_as(x).requires_grad_() for x in (k, v)]
    check([q, *one, dout[..., :1].expand_as(dout)])
    check([q.detach().mT.contiguous().mT.requires_grad_(), k, v, dout])


@pytest.mark.parametrize("empty", [3, 4, 0])
def test_empty_tensors(empty: int) -> None:
    sizes = tuple(0 if n == empty else size for n, size in enumerate(SIZES))
    given = drawn(sizes=sizes)
    out, dq, dk, dv = both(given)
    assert [x.shape for x in (dq, dk, dv)] == [x.shape for x in given[:3]]
    assert not out.any()
    assert not any(x.any() for x in (dq, dk, dv))


def test_autocast() -> None:
    q, k, v, _ = drawn(torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        narrow = attention(q, k, v)
    same([narrow], [attention(q.bfloat16(), k.bfloat16(), v.bfloat16())])
    narrow.sum().backward()
    assert q.grad.dtype is torch.float32


# --- in place of others ---------------------------------------------------------------------------


def test_sdpa() -> None:
    q, k, v, dout = given = drawn(torch.float32, (2, 4, 4, 67, 131, 64))
    mask = torch.randn(67, 131, device="cuda").requires_grad_()
    with sdpa():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    dq, dk, dv, dbias = torch.autograd.grad(out, (q, k, v, mask), dout)
    hold(given, (out, None), Gradients(dq, dk, dv, dbias, None, None), bias=mask)


def test_a_graph_that_needs_an_overwritten_cache_says_so() -> None:
    q, k, v, _ = (x.detach().transpose(1, 2) for x in drawn())
    caches = [torch.zeros(2, 140, 2, 64, device="cuda", dtype=q.dtype) for _ in range(2)]
    weight = torch.ones((), device="cuda", requires_grad=True)
    earlier = [(x * weight).sum() for x in caches]
    with torch.no_grad():
        flash_attn_with_kvcache(q, caches[0], caches[1], k, v, cache_seqlens=3, causal=True)
    for x in earlier:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            x.backward()


def test_a_compiled_loop_of_calls_on_a_cache_is_one_graph() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    fast = torch.compile(flash_attn_with_kvcache, backend=counter, fullgraph=True)
    ours, theirs = torch.zeros(2, 2, 2, 140, 2, 64, device="cuda", dtype=torch.float16)
    for n in range(5):
        q, k, v, _ = (x.detach().transpose(1, 2)[:, :1] for x in drawn(seed=n))
        lengths = torch.tensor([n, 50 + n], dtype=torch.int32, device="cuda")
        options = {"cache_seqlens": lengths, "causal": True}
        found = fast(q, ours[0], ours[1], k, v, **options)
        assert torch.equal(found, flash_attn_with_kvcache(q, theirs[0], theirs[1], k, v, **options))
        assert torch.equal(ours, theirs)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_flash_attn_varlen_func() -> None:
    given = [x.detach()[0] for x in drawn()]
    cu_q = torch.tensor([0, 20, 20, 67], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 31, 60, 131], dtype=torch.int32, device="cuda")
    q, k, v, dout = (x.transpose(0, 1).contiguous() for x in given)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_varlen_func(q, k, v, cu_q, cu_k, causal=True)
    results = (x.transpose(0, 1) for x in (out, *torch.autograd.grad(out, tensors, dout)))
    out, dq, dk, dv = results
    grads = Gradients(dq, dk, dv, None, None, None)
    hold(given, (out, None), grads, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)


def test_flash_attn_with_kvcache() -> None:
    """In float64, so that rotations on the GPU and on the CPU are the same but for rounding."""
    q, k_cache, v_cache, _ = (x.detach().transpose(1, 2).contiguous() for x in drawn(torch.float64))
    q, k, v = q[:, :3], k_cache[:, :3] + 1, v_cache[:, :3] + 1
    angles = torch.rand(140, 8, device="cuda", dtype=torch.float64)
    lengths = torch.tensor([128, 5], dtype=torch.int32)
    options: dict[str, Any] = {"k": k, "v": v, "cache_seqlens": lengths.cuda(), "causal": True}
    options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    reading = dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin"))
    each: list[dict[str, Any]] = [
        {},
        {"cache_batch_idx": torch.tensor([1, 0])},  # as pages, too
        {"cache_leftpad": torch.tensor([100, 2])},
        {"learnable_sink": torch.randn(4, dtype=torch.float64)},
    ]
    for more in (*each, *(reading | more for more in each)):
        results = []
        for to in (torch.Tensor.cuda, torch.Tensor.cpu):
            caches = [to(x.clone()) for x in (k_cache, v_cache)]
            given = options | more
            there = {n: to(x) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
            out = flash_attn_with_kvcache(to(q), *caches, **there)
            results.append([x.cpu() for x in (out, *caches)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)


# --- streams, memory and graphs -------------------------------------------------------------------


@pytest.mark.parametrize("side", [False, True])
def test_calls_run_in_the_order_of_the_current_stream(side: bool) -> None:
    """Inputs are written after a long wait, and results are read, without waiting for either."""
    given = drawn()
    expected = [2 * x for x in both(given, causal=True, deterministic=True)]
    late = [torch.zeros_like(x).requires_grad_(x.requires_grad) for x in given]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        both(late, causal=True, deterministic=True)  # takes memory for this stream
        stream.synchronize()
        torch.cuda._sleep(LONG)
        for x, there in zip(late, given, strict=True):
            x.data.copy_(there.data)
        found = [2 * x for x in both(late, causal=True, deterministic=True)]
        assert not stream.query()  # the calls have returned before they ran
        for x in late:
            x.data.zero_()
    stream.synchronize()
    same(found, expected)


def test_memory_is_that_of_pytorch() -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    given = drawn(torch.float32)
    options = _options()["bias"] | {"kv_lengths": [131, 40]}
    both(given, **options)  # compiles
    gc.collect()  # what earlier tests have left must not be freed meanwhile
    torch.cuda.empty_cache()  # frees tensors that other streams used: they count until then
    of_cupy = pool.used_bytes(), pool.total_bytes()
    before = torch.cuda.memory_allocated()
    results = both(given, **options)
    grown = torch.cuda.memory_allocated() - before
    assert grown >= sum(x.nbytes for x in results)
    assert (pool.used_bytes(), pool.total_bytes()) == of_cupy
    for x in results:
        x.record_stream(torch.cuda.Stream())
    del results, x
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("name", [None, "lengths", "mask", "function"])
def test_a_graph_is_replayed_on_new_data(name: str | None) -> None:
    options: dict[str, Any] = {"causal": True, "deterministic": True}
    options |= _options()[name] if name else {}
    given, fresh = drawn(), drawn(seed=9)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        both(given, **options)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(given, **options)
    for x, new in zip(given, fresh, strict=True):
        x.data.copy_(new.data)
    others = [torch.full_like(x, torch.nan) for x in found]  # memory that the graph must not use
    graph.replay()
    same(found, both(fresh, **options))
    assert all(x.isnan().all() for x in others)


@pytest.mark.parametrize("name", ["kv_lengths", "q_offset", "cu_seqlens_q"])
def test_a_graph_replays_other_lengths(name: str) -> None:
    """Integers on the GPU are read in each replay; offsets have the same number of tokens."""
    given = drawn()
    values: tuple[tuple[int, ...], ...] = (131, 40), (7, 90)
    if name == "cu_seqlens_q":
        given = [x.detach()[0, :, :67].requires_grad_(n < 3) for n, x in enumerate(given)]
        values = (0, 30, 67), (0, 61, 67)
    own = torch.tensor(values[0], dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"causal": True, "deterministic": True}
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        both(given, **options, **{name: own})
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(given, **options, **{name: own})
    for new in (values[1], values[0]):
        own.copy_(torch.tensor(new))
        graph.replay()
        same(found, both(given, **options, **{name: own.clone()}))


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    import cupy

    given = drawn()
    expected = both(given, causal=True, deterministic=True)
    there = [x.detach().to("cuda:1").requires_grad_(x.requires_grad) for x in given]
    found = both(there, causal=True, deterministic=True)
    assert {x.device for x in found} == {torch.device("cuda:1")}
    same([x.cpu() for x in found], [x.cpu() for x in expected])
    assert torch.cuda.current_device() == cupy.cuda.runtime.getDevice() == 0
    with pytest.raises(
        ValueError, match="k must be on the device of q, cuda:1; got a tensor on cuda:0"
    ):
        attention(there[0], *given[1:3])


# --- compilers and errors -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs"])
def test_compiled_calls_are_one_graph(backend: str) -> None:
    given = drawn()
    options: dict[str, Any] = {"causal": True, "deterministic": True}

    def f(q: Any, k: Any, v: Any, **more: Any) -> Any:
        return attention(q, k, v, **options, **more)

    torch._dynamo.reset()
    fast = torch.compile(f, backend=backend, fullgraph=True)
    expected = both(given, **options)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        out = fast(*given[:3])
        same((out, *torch.autograd.grad(out, given[:3], given[3])), expected)
    same([fast(*given[:3], kv_lengths=[131, 40])], [f(*given[:3], kv_lengths=[131, 40])])
    torch._dynamo.reset()


def test_a_compiled_decoding_step_is_a_cuda_graph() -> None:
    """Neither lengths on the GPU nor a causal mask at the top left keep a tensor on the CPU."""
    from torch._dynamo.utils import counters

    q, k, v, _ = (x.detach() for x in drawn(sizes=(2, 4, 2, 67, 67, 64)))
    lengths = torch.tensor([67, 40], dtype=torch.int32, device="cuda")

    def step(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        x = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attention(x, k, v, kv_lengths=lengths)

    torch._dynamo.reset()
    counters.clear()
    fast = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    for n in (67, 5, 40, 23):
        lengths.fill_(n)
        expected = step(q, k, v, lengths)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(fast(q, k, v, lengths), expected)
    assert not counters["inductor"]["cudagraph_skips"]
    torch._dynamo.reset()


def test_operators_keep_pytorchs_rules() -> None:
    q, k, v, dout = drawn()
    values = dict.fromkeys(INPUTS) | {"q": q, "k": k, "v": v, "dropout_p": 0.0, "backend": "auto"}
    values |= {"aux": [], "deterministic": True, "right": 0}
    values |= {"bias": torch.zeros(4, 1, 131, device="cuda", requires_grad=True)}
    values |= {"kv_lengths": torch.tensor([131, 40]), "q_offset": torch.tensor([60, 3]).cuda()}
    inputs = tuple(values[name] for name in INPUTS)
    torch.library.opcheck(torch.ops.tileattn.forward.default, inputs)
    with torch.no_grad():
        out, lse = torch.ops.tileattn.forward(*inputs)
    rest = (dout, None, out, lse, ["q", "v", "bias"], *inputs)
    rest = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, rest)
    torch.library.opcheck(torch.ops.tileattn.backward.default, rest)


def test_what_is_not_accepted_is_named() -> None:
    q, k, v, _ = (x.detach() for x in drawn())
    mask = torch.ones(67, 131, dtype=torch.bool)
    with pytest.raises(ValueError, match="k must be on the device of q, cuda:0; got"):
        attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match="mask must be on the device of q, cuda:0; got"):
        attention(q, k, v, mask=mask)
    with pytest.raises(ValueError, match="kv_lengths must be on the CPU; got a tensor on cuda:0"):
        attention(q.cpu(), k.cpu(), v.cpu(), kv_lengths=torch.tensor([3, 4]).cuda())
    with pytest.raises(ValueError, match="seed must be on the CPU; got a tensor on cuda:0"):
        attention(q, k, v, dropout_p=0.5, seed=torch.tensor(3).cuda())
    with pytest.raises(TypeError, match="must be a NumPy array"):
        attention(q, k, v, backend="numpy")
    with pytest.raises(TypeError, match=r"q must have dtype .*; got complex64"):
        attention(q.to(torch.complex64), k, v)
    with pytest.raises(ValueError, match="v must have the length of k, "):
        attention(q, k, v[:, :, :3])
    with torch.device("cuda"):
        expected = attention(q, k, v, kv_lengths=torch.tensor([131, 40], device="cpu"))
        same([attention(q, k, v, kv_lengths=[131, 40])], [expected])
    assert tileattn.available_backends()["cupy"] is None
