"""The functions of inference engines on tensors, beside the same functions on arrays."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - PyTorch may be absent

import tileattn  # noqa: E402 - as above
from tests.torch.graphs import graphs_of  # noqa: E402 - as above
from tests.torch.test_cuda import elsewhere  # noqa: E402 - as above
from tileattn import reference  # noqa: E402 - as above
from tileattn.errors import UnsupportedError  # noqa: E402 - as above
from tileattn.testing import assert_attention_close, error_bound  # noqa: E402 - as above
from tileattn.torch import append_kv, attention, explain, merge, rope  # noqa: E402 - as above
from tileattn.torch.tensors import array_of  # noqa: E402 - as above

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
B, H, N, D, DV, CAPACITY, M = 2, 3, 5, 12, 8, 24, 40


def drawn(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def strided(x: Any) -> Any:
    """Copy a tensor into a buffer of tokens before heads, with gaps."""
    whole = torch.zeros(*x.shape[:-3], 2 * x.shape[-2] + 1, x.shape[-3], x.shape[-1] + 3)
    view = whole.to(x.dtype)[..., 1::2, :, 3:].transpose(-3, -2)
    return view.copy_(x)


ANGLE = drawn(M, 4, seed=9)
COS, SIN = ANGLE.cos(), ANGLE.sin()
X = drawn(B, H, N, D, seed=1)


class Ignored(TorchDispatchMode):  # type: ignore[misc]  # untyped
    """A mode that sends calls through PyTorch's dispatcher."""

    def __torch_dispatch__(self, f: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


@pytest.fixture(params=["eager", "dispatched", "compiled"])
def way(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Call a function plainly, through the dispatcher, or in a compiled program."""
    if request.param == "dispatched":
        with Ignored():
            yield lambda f, *given, **options: f(*given, **options)
    elif request.param == "compiled":
        torch._dynamo.reset()
        yield lambda f, *given, **options: torch.compile(f, backend="aot_eager", fullgraph=True)(
            *given, **options
        )
        torch._dynamo.reset()
    else:
        yield lambda f, *given, **options: f(*given, **options)


def same(found: Any, expected: Any) -> None:
    """Compare tensors with arrays bit by bit."""
    assert found.device.type == "cpu"
    np.testing.assert_array_equal(array_of(found.detach()), expected, strict=True)


# --- rope -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("positions", "interleaved", "inverse"),
    [
        (None, False, True),
        (5, True, False),
        (torch.tensor(4), False, False),
        ([3, 0, 39, 1, 1], True, True),
        (torch.arange(7, 7 + N, dtype=torch.int32), False, False),
        (torch.arange(B * N).view(N, B).T, True, False),
    ],
    ids=["none", "number", "scalar", "list", "int32", "entries"],
)
def test_rope_is_that_of_arrays(
    way: Any, dtype: Any, positions: Any, interleaved: bool, inverse: bool
) -> None:
    x, tables = strided(X.to(dtype)), (COS.T.contiguous().T, SIN.to(torch.bfloat16))
    options: dict[str, Any] = {"interleaved": interleaved, "inverse": inverse}
    found = way(rope, x, *tables, positions=positions, **options)
    there = array_of(positions) if isinstance(positions, torch.Tensor) else positions
    expected = tileattn.rope(*map(array_of, (x, *tables)), positions=there, **options)
    same(found, expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_of_rope_is_exact(interleaved: bool) -> None:
    positions = torch.arange(B * N).view(B, N)

    def f(x: Any) -> Any:
        return rope(x, COS, SIN, positions=positions, interleaved=interleaved)

    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(f, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_of_rope_is_the_rotation_back(dtype: Any) -> None:
    x, upstream = X.to(dtype).requires_grad_(), drawn(*X.shape, seed=2, dtype=dtype)
    rope(x, COS, SIN, positions=3, inverse=True).backward(upstream)
    assert torch.equal(x.grad, rope(upstream, COS, SIN, positions=3))


def test_a_compiled_rotation_has_a_gradient_and_takes_new_positions() -> None:
    torch._dynamo.reset()

    def f(x: Any, positions: Any) -> Any:
        return rope(x * 2, COS, SIN, positions=positions)

    fast, graphs = graphs_of(f, fullgraph=True)
    x = X.clone().requires_grad_()
    for n in range(4):
        positions = torch.arange(n, n + N)
        found, expected = fast(x, positions), f(x, positions)
        assert torch.equal(found, expected)
        weight = drawn(*X.shape, seed=n)
        grads = (torch.autograd.grad(y, x, weight)[0] for y in (found, expected))
        assert torch.equal(*grads)
    assert len(graphs) == 1


def test_batches_of_torch_vmap_are_rotated() -> None:
    x = torch.stack([X, 2 * X], 1)
    found = torch.vmap(lambda x: rope(x, COS, SIN), 1)(x)
    assert torch.equal(found, torch.stack([rope(X, COS, SIN), rope(2 * X, COS, SIN)]))


def test_positions_may_not_change_before_the_backward_pass() -> None:
    positions = torch.arange(N)
    out = rope(X.clone().requires_grad_(), COS, SIN, positions=positions)
    positions += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- append_kv ------------------------------------------------------------------------------------


def caches(dtype: Any) -> list[Any]:
    shapes = (B, H, CAPACITY, D), (B, H, CAPACITY, DV)
    return [strided(drawn(*shape, seed=n, dtype=dtype)) for n, shape in enumerate(shapes)]


def paged(x: Any) -> Any:
    """Cut entries into pages of 6 keys."""
    return x.transpose(1, 2).reshape(-1, 6, H, x.shape[-1]).transpose(1, 2)


BATCH = (B, H, N)
PACKED = (H, 7)
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "number": (BATCH, {"kv_lengths": 4}),
    "list": (BATCH, {"kv_lengths": [0, CAPACITY - N]}),
    "int32": (BATCH, {"kv_lengths": torch.tensor([3, 0], dtype=torch.int32)}),
    "every_second": (BATCH, {"kv_lengths": torch.tensor([3, 9, 0, 9])[::2]}),
    "nothing": ((B, H, 0), {"kv_lengths": torch.tensor([3, CAPACITY])}),
    "packed": (PACKED, {"kv_lengths": [2, 0], "cu_seqlens": torch.tensor([0, 0, 7])}),
    "pages": (
        BATCH,
        {"kv_lengths": torch.tensor([5, 0]), "block_table": torch.tensor([[4, 1], [0, 7]])},
    ),
    "packed_pages": (
        PACKED,
        {
            "kv_lengths": torch.tensor([5, 0], dtype=torch.int32),
            "block_table": torch.tensor([[4, 1], [0, 7]], dtype=torch.int32),
            "cu_seqlens": torch.tensor([0, 4, 7], dtype=torch.int32),
        },
    ),
}


# The bridge has no code for a dtype: each case has every second one, the next case the others.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, x) for n, case in enumerate(CASES) for x in DTYPES[n % 2 :: 2]],
    ids=str,
)
@pytest.mark.parametrize("rotated", [False, True])
def test_append_kv_writes_what_it_writes_to_arrays(
    way: Any, case: str, rotated: bool, dtype: Any
) -> None:
    shape, options = CASES[case]
    options = options | ({"rotary": (COS, SIN), "interleaved": True} if rotated else {})
    ours = [paged(x) if "block_table" in options else x for x in caches(dtype)]
    k, v = (strided(drawn(*shape, n, seed=n, dtype=dtype)) for n in (D, DV))
    theirs, before = ([array_of(x.clone()) for x in ours] for _ in range(2))

    def arrays(x: Any) -> Any:
        return array_of(x) if isinstance(x, torch.Tensor) else x

    there = {name: arrays(x) for name, x in options.items()}
    if rotated:
        there["rotary"] = tuple(map(array_of, (COS, SIN)))
    found = way(append_kv, *ours, k, v, **options)
    same(found, tileattn.append_kv(*theirs, *map(array_of, (k, v)), **there))
    for x, y, old in zip(ours, theirs, before, strict=True):
        same(x, y)
        assert np.array_equal(y, old) == (case == "nothing")


@pytest.mark.parametrize("inference", [False, True])
def test_a_graph_that_needs_what_was_overwritten_says_so(inference: bool) -> None:
    k_cache, v_cache = caches(torch.float64)
    k, v = drawn(B, H, N, D), drawn(B, H, N, DV)
    earlier = (k_cache * torch.ones((), dtype=torch.float64, requires_grad=True)).sum()
    before = v_cache._version
    with torch.inference_mode(inference):
        append_kv(k_cache, v_cache, k, v, kv_lengths=3)
    assert v_cache._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        earlier.backward()


def test_appended_keys_are_attended() -> None:
    k_cache, v_cache = caches(torch.float64)
    q, k, v = (drawn(B, H, N, n, seed=n) for n in (D, D, DV))
    lengths = append_kv(k_cache, v_cache, k, v, kv_lengths=torch.tensor([0, 9]))
    out = attention(q, k_cache, v_cache, kv_lengths=lengths, causal=True)
    first = [x[:1].numpy() for x in (q, k, v)]  # whose cache was empty
    exact, bounds = reference.forward(*first, causal=True), error_bound(*first, causal=True)
    assert_attention_close(out[:1], exact, bounds)


def test_operators_keep_pytorchs_rules() -> None:
    k_cache, v_cache = (x.contiguous() for x in caches(torch.float32))
    k, v = drawn(B, H, N, D, dtype=torch.float32), drawn(B, H, N, DV, dtype=torch.float32)
    ops, lengths = torch.ops.tileattn, torch.tensor([3, 9])
    new = k, v, lengths, None, None, COS, SIN
    torch.library.opcheck(ops.append_kv.default, (k_cache, v_cache, *new, None, None, True))
    bytes_of = [x.to(torch.int8) for x in (k_cache, v_cache)]
    descales = torch.zeros(k_cache.shape[:-1]), torch.ones(H)
    torch.library.opcheck(ops.append_kv.default, (*bytes_of, *new, *descales, True))
    x = X.clone().requires_grad_()
    torch.library.opcheck(ops.rope.default, (x, COS, SIN, lengths[:1].expand(N), False, True))
    outs, lses = ([drawn(*s, seed=n).requires_grad_() for n in (1, 2)] for s in ((B, 4, 3), (B, 4)))
    torch.library.opcheck(ops.merge.default, (outs, lses))


# --- merge ----------------------------------------------------------------------------------------


def parts(dtype: Any, **options: Any) -> tuple[list[Any], list[Any], Any]:
    """Attend to three sets of keys, of which some rows see none, and to all of them."""
    q, k, v = (drawn(B, H, n, d, seed=n).to(dtype) for n, d in ((N, D), (14, D), (14, DV)))
    cuts = [(0, 3), (3, 8), (8, 14)]
    visible = torch.ones(N, 14, dtype=torch.bool)
    visible[1, 3:8] = visible[2] = False
    given = [(k[:, :, a:b], v[:, :, a:b], visible[:, a:b]) for a, b in [*cuts, (0, 14)]]
    found = [attention(q, x, y, mask=m, return_lse=True, **options) for x, y, m in given]
    return [x.out for x in found[:3]], [x.lse for x in found[:3]], found[3]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_is_that_of_arrays(way: Any, dtype: Any, count: int) -> None:
    outs, lses, _ = parts(dtype)
    outs, lses = [strided(x) for x in outs[:count]], lses[:count]
    found = way(merge, outs, lses)
    assert isinstance(found, tileattn.Attention)
    expected = tileattn.merge([*map(array_of, outs)], [*map(array_of, lses)])
    for x, y in zip(found, expected, strict=True):
        same(x, y)


def test_the_gradient_of_merge_is_exact() -> None:
    outs = [drawn(B, 4, 3, seed=n).requires_grad_() for n in range(3)]
    lses = [drawn(B, 4, seed=n + 5).requires_grad_() for n in range(3)]

    def f(*given: Any) -> Any:
        return tuple(merge(given[:3], given[3:]))

    assert torch.autograd.gradcheck(f, (*outs, *lses), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, (*outs, *lses))


def test_merged_gradients_are_those_of_one_call() -> None:
    q, k, v = (drawn(B, H, n, D, seed=n).requires_grad_() for n in (N, 13, 13))
    mask = torch.ones(N, 13, dtype=torch.bool)
    mask[1, :6] = mask[2] = False

    def attend(at: slice) -> Any:
        return attention(q, k[:, :, at], v[:, :, at], mask=mask[:, at], return_lse=True)

    both = attend(slice(0, 6)), attend(slice(6, None))
    merged = merge([x.out for x in both], [x.lse for x in both])
    whole = attend(slice(None))
    seen = (whole.lse != -torch.inf).detach()
    grads = [
        torch.autograd.grad(x.out.cos().sum() + x.lse[seen].sin().sum(), (q, k, v))
        for x in (merged, whole)
    ]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y)


def test_what_rows_without_keys_hold_has_no_gradient() -> None:
    outs = [torch.full((2, 3), torch.nan, requires_grad=True), torch.ones(2, 3, requires_grad=True)]
    lses = [torch.full((2,), -torch.inf), torch.tensor([0.0, -torch.inf])]
    lses = [x.requires_grad_() for x in lses]
    found = merge(outs, lses)
    grads = torch.autograd.grad(found.out.sum(), [*outs, *lses])
    assert [x.tolist() for x in grads] == [[[0] * 3] * 2, [[1] * 3, [0] * 3], [0, 0], [0, 0]]


# --- explain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_explain_is_that_of_arrays(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (strided(drawn(B, H, n, D, seed=n, dtype=dtype)) for n in (N, 13, 13))
    lengths, mask = torch.tensor([13, 4], dtype=torch.int32), torch.ones(N, 13, dtype=torch.bool)
    options: dict[str, Any] = {"window": (3, 1), "softcap": 5.0, "dropout_p": 0.5}
    monkeypatch.setattr(tileattn, "forward", None)
    found = explain(q, k, v, kv_lengths=lengths, mask=mask, seed=torch.tensor(7), **options)
    arrays = [array_of(x) for x in (q, k, v)]
    options |= {"kv_lengths": lengths.numpy(), "mask": mask.numpy(), "seed": 7}
    assert found == tileattn.explain(*arrays, **options)


def test_explain_takes_functions_and_tensors_that_need_gradients() -> None:
    q, k, v = (drawn(H, n, D, seed=n).requires_grad_() for n in (N, 13, 13))
    table = drawn(H, 13).requires_grad_()
    report = explain(
        q, k, v, score_mod=lambda s, _b, h, _i, j, x: s + x[h, j], aux=(table,), backend="numpy"
    )
    assert report.reasons[0] == "backend='numpy' asks for it"
    with torch.autocast("cpu", torch.bfloat16):
        narrow = [x.detach().float() for x in (q, k, v)]
        assert explain(*narrow) == explain(*(x.bfloat16() for x in narrow))


# --- what is refused ------------------------------------------------------------------------------

ROTATED = {"x": X, "cos": COS, "sin": SIN}
APPENDED = {
    **dict(zip(("k_cache", "v_cache"), caches(torch.float64), strict=True)),
    **{"k": drawn(B, H, N, D), "v": drawn(B, H, N, DV), "kv_lengths": 3},
}
MERGED = {"outs": [drawn(B, N, D)] * 2, "lses": [drawn(B, N)] * 2}
EXPLAINED = dict.fromkeys("qkv", X)
NEEDED = X.clone().requires_grad_()


@pytest.mark.parametrize(
    ("call", "given", "changed", "error", "message"),
    [
        (rope, ROTATED, {"x": X.numpy()}, TypeError, "x must be a torch.Tensor; got ndarray"),
        (rope, ROTATED, {"x": X.long()}, TypeError, "x must have dtype float16, .*; got int64"),
        (rope, ROTATED, {"sin": SIN[1:]}, ValueError, "sin must have the shape of cos"),
        (rope, ROTATED, {"cos": COS.to("meta")}, ValueError, "cos must be on the device of x, cpu"),
        (rope, ROTATED, {"positions": M - 1}, ValueError, "positions must be from 0 to 39"),
        (rope, ROTATED, {"positions": True}, TypeError, "positions must be an integer, or"),
        (rope, ROTATED, {"positions": "a"}, TypeError, "positions must be integers; got 'a'"),
        (
            *(rope, ROTATED, {"positions": elsewhere("cuda:0", torch.arange(N))}),
            *(ValueError, "positions must be on the CPU; got a tensor on cuda:0"),
        ),
        (
            *(rope, ROTATED, {"cos": COS.clone().requires_grad_()}),
            *(UnsupportedError, "cos requires a gradient, which rope does not compute"),
        ),
        (rope, ROTATED, {"inverse": 1}, TypeError, "inverse must be True or False; got 1"),
        (append_kv, APPENDED, {"k": X.half()}, TypeError, "k must have the dtype of k_cache"),
        (
            *(append_kv, APPENDED, {"v_cache": elsewhere("cuda:0", X)}),
            *(ValueError, "v_cache must be on the device of k_cache, cpu; got a tensor on cuda:0"),
        ),
        (
            *(append_kv, APPENDED, {"kv_lengths": elsewhere("cuda:0", torch.arange(B))}),
            *(ValueError, "kv_lengths must be on the CPU; got a tensor on cuda:0"),
        ),
        (append_kv, APPENDED, {"kv_lengths": None}, TypeError, "kv_lengths must be an integer"),
        (append_kv, APPENDED, {"kv_lengths": [3]}, ValueError, "kv_lengths must be an integer"),
        (append_kv, APPENDED, {"kv_lengths": [3, 20]}, ValueError, "kv_lengths must be from 0 to"),
        (append_kv, APPENDED, {"kv_lengths": [3.0, 2]}, TypeError, "kv_lengths must be an integer"),
        (append_kv, APPENDED, {"rotary": COS}, TypeError, "rotary must be a tuple"),
        (
            *(append_kv, APPENDED, {"rotary": (COS, SIN.numpy())}),
            *(TypeError, "sin must be a torch.Tensor; got ndarray"),
        ),
        (
            *(append_kv, APPENDED, {"k": NEEDED}),
            *(UnsupportedError, "k requires a gradient, which append_kv does not compute"),
        ),
        (
            *(append_kv, APPENDED, {"k_cache": torch._neg_view(APPENDED["k_cache"])}),
            *(UnsupportedError, "k_cache must hold its elements in memory"),
        ),
        (
            *(append_kv, APPENDED, {"k_cache": APPENDED["k_cache"][:1].expand(B, -1, -1, -1)}),
            *(ValueError, "k_cache must not overlap itself"),
        ),
        (merge, MERGED, {"outs": X}, TypeError, r"outs must be a sequence of tensors.*list\(outs"),
        (merge, MERGED, {"outs": [], "lses": []}, ValueError, "outs and lses must have as many"),
        (merge, MERGED, {"lses": [drawn(B, N)]}, ValueError, "outs and lses must have as many"),
        (merge, MERGED, {"lses": [drawn(B, N), 1]}, TypeError, r"lses\[1\] must be a torch.Tensor"),
        (
            *(merge, MERGED, {"lses": [drawn(B, N).float()] * 2}),
            *(TypeError, r"lses\[0\] must have dtype float64; got float32"),
        ),
        (
            *(merge, MERGED, {"outs": [drawn(B, N, D), drawn(B, N, D).to("meta")]}),
            *(ValueError, r"outs\[1\] must be on the device of outs\[0\], cpu"),
        ),
        (explain, EXPLAINED, {"q": X.to("meta")}, UnsupportedError, "q must be on the CPU or on"),
        (explain, EXPLAINED, {"q": X.numpy()}, TypeError, "q must be a torch.Tensor; got ndarray"),
        (explain, EXPLAINED, {"k": X.float()}, TypeError, "k must have the dtype of q"),
        (explain, EXPLAINED, {"is_causal": True}, TypeError, ".*did you mean 'causal'"),
    ],
)
def test_what_is_not_accepted_is_named(
    call: Any, given: Any, changed: Any, error: Any, message: str
) -> None:
    before = [x.clone() for x in given.values() if isinstance(x, torch.Tensor)]
    with pytest.raises(error, match=f"^{message}"):
        call(**given | changed)
    after = [x for x in given.values() if isinstance(x, torch.Tensor)]
    assert all(map(torch.equal, before, after))


def test_append_kv_takes_what_needs_gradients_where_none_are_recorded() -> None:
    given = APPENDED | {"k_cache": APPENDED["k_cache"].clone(), "k": NEEDED}
    with torch.no_grad():
        assert append_kv(**given).tolist() == [3 + N] * B


def test_batches_of_torch_vmap_are_not_written() -> None:
    batch = torch.stack([APPENDED["k"]] * 2)
    with pytest.raises(UnsupportedError, match=r"append_kv does not append keys under torch\.vmap"):
        torch.vmap(lambda k: append_kv(**APPENDED | {"k": k}))(batch)
