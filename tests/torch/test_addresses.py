"""Repeated calls on GPU tensors, by addresses: the same launches as on arrays. Needs no GPU."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import tileattn  # noqa: E402 - PyTorch may be absent
from tests.backends.cupy.fake_cupy import Machine  # noqa: E402 - as above
from tests.torch import fake_gpu  # noqa: E402 - as above
from tests.torch.fake_gpu import STREAM, on_gpu  # noqa: E402 - as above
from tests.torch.test_eager import both, drawn  # noqa: E402 - as above
from tileattn.call.prepared import SEEN_OFTEN  # noqa: E402 - as above
from tileattn.torch import attention, eager, operators  # noqa: E402 - as above


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_gpu.gpu(monkeypatch) as made:
        yield made


def on_arrays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which passes run on CuPy arrays."""
    names: list[str] = []
    for name in ("forward", "backward"):
        run = getattr(tileattn, name)

        def watched(*given: Any, name: str = name, run: Any = run, **options: Any) -> Any:
            names.append(name)
            return run(*given, **options)

        monkeypatch.setattr(tileattn, name, watched)
    return names


PARTS = (
    *("lse", "delta", "lse_log2", "row_max", "dq_accum", "head_flags"),
    *("row_counter", "tile_counter", "dq_semaphore", "dq_counter", "block_order", "next_tiles"),
)


STORED = ("kv_lengths", "q_offset", "cu_seqlens_q", "cu_seqlens_k")  # if the host knows them


def launched(gpu: Machine, given: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
    """Run both passes; return the launches and the results.

    Addresses become offsets into their tensors; those of the workspace are left out, and the values
    that are stored there come last.
    """
    gpu.launches.clear()
    gpu.streams.clear()
    gpu.stored.clear()
    results = both(*given, **options)
    assert {*gpu.streams} == {STREAM}
    names = ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
    tensors = dict(zip(names, (*given, *results), strict=True))
    tensors |= {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    found = []
    for key, blocks, shared, params in gpu.launches:
        fields = {name: params[name].tolist() for name in params.dtype.names}
        for name, x in tensors.items():
            if fields[name]:
                fields[name] -= x.data_ptr()
        fields |= {name: bool(fields[name]) for name in PARTS}
        for name in STORED:
            if name not in tensors and fields[name]:
                fields[name] = fields[name] in {address for address, _ in gpu.stored}
        found.append((key, blocks, shared, fields))
    return [*found, [values for _, values in gpu.stored]], [*results]


def tensors(dtype: Any = torch.bfloat16, transposed: bool = False) -> list[Any]:
    given = [x.detach() for x in drawn(dtype=dtype)]
    if transposed:
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    return [on_gpu(x).requires_grad_(n < 3) for n, x in enumerate(given)]


def flat(ndim: int) -> list[Any]:
    """Return tensors of one batch entry with this number of axes."""
    return [on_gpu(x[(0,) * (4 - ndim)]).requires_grad_(n < 3) for n, x in enumerate(tensors())]


def integers(*values: int, dtype: Any = torch.int32) -> Any:
    return on_gpu(torch.tensor(values, dtype=dtype))


CALLS: dict[str, tuple[Any, Any]] = {
    "plain": (tensors, dict),
    "other strides": (lambda: tensors(transposed=True), lambda: {"causal": True}),
    "deterministic": (tensors, lambda: {"deterministic": True}),
    "window": (tensors, lambda: {"window": (3, 1), "softcap": 2.0}),
    "lengths on the host": (tensors, lambda: {"kv_lengths": (9, 4)}),
    "two axes": (lambda: flat(2), dict),
    "three axes": (lambda: flat(3), lambda: {"causal": True}),
    "packed on the host": (
        lambda: flat(3),
        lambda: {"cu_seqlens_q": (0, 2, 5), "cu_seqlens_k": (0, 3, 9)},
    ),
    "packed": (
        lambda: flat(3),
        lambda: {"cu_seqlens_q": integers(0, 2, 5), "cu_seqlens_k": integers(0, 3, 9)},
    ),
    "lengths": (
        tensors,
        lambda: {"kv_lengths": integers(9, 4), "q_offset": integers(3, 0, dtype=torch.int64)},
    ),
    "slopes": (tensors, lambda: {"alibi_slopes": on_gpu(torch.rand(2, 4)), "causal": True}),
    "sinks": (tensors, lambda: {"sinks": on_gpu(torch.rand(4)), "kv_lengths": (9, 4)}),
    "mask": (tensors, lambda: {"mask": on_gpu((torch.rand(9, 5) > 0.5).mT)}),
    "bias": (tensors, lambda: {"bias": on_gpu(torch.rand(4, 1, 9, dtype=torch.bfloat16))}),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_by_addresses_are_those_on_arrays(
    gpu: Machine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = on_arrays(monkeypatch)
    rows, options = CALLS[name]
    expected, results = launched(gpu, rows(), **options())
    assert names == ["forward", "backward"]
    for _ in range(2):
        given = options()
        found, others = launched(gpu, rows(), **given)
        assert found == expected
        for x, y in zip(others, results, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        addresses = {n: x.data_ptr() for n, x in given.items() if isinstance(x, torch.Tensor)}
        for *_, params in gpu.launches:
            assert {n: int(params[n]) for n in addresses} == addresses
    assert names == ["forward", "backward"]


def test_pages_are_brought_by_address(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    names = on_arrays(monkeypatch)
    pool = on_gpu(torch.zeros(7, 2, 16, 64, dtype=torch.float16))
    q = on_gpu(torch.zeros(3, 4, 1, 64, dtype=torch.float16))
    for _ in range(3):
        gpu.launches.clear()
        options = {"block_table": on_gpu(torch.zeros(3, 2).int()), "kv_lengths": integers(9, 4, 30)}
        attention(q, pool, pool, **options)
        for *_, params in gpu.launches:
            assert all(params[name] == x.data_ptr() for name, x in options.items())
    assert names == ["forward"]


def test_integers_on_the_host_are_read_in_every_call(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = on_arrays(monkeypatch)
    for lengths in ((9, 9), (4, 4), (4, 4)):
        attention(*tensors()[:3], kv_lengths=torch.tensor(lengths))
        assert gpu.launches[-1][-1]["length"] == lengths[0]
    assert names == ["forward"] * 3


def test_values_beside_tensors_are_those_of_the_call(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = on_arrays(monkeypatch)
    lengths = integers(9, 4)
    for _ in range(SEEN_OFTEN + 2):
        names.clear()
        for causal, softcap in ((True, 2.0), (False, 2.0), (True, 3.0)):
            attention(*tensors()[:3], kv_lengths=lengths, causal=causal, softcap=softcap)
            params = gpu.launches[-1][-1]
            assert (params["right"] == 0, params["softcap"]) == (causal, softcap)
            assert params["kv_lengths"] == lengths.data_ptr()
    assert names == []  # calls that come often


def test_gradients_of_options_are_where_they_belong(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of the options, and for any subset of gradients."""
    names = on_arrays(monkeypatch)
    kinds = {"sinks": (4,), "bias": (2, 1, 5, 9)}
    needs = [("sinks", "bias"), ("bias",), ("sinks",), ("sinks", "bias")]
    for needed in (*needs, *needs):
        q, k, v, dout = tensors()
        options = {n: on_gpu(torch.rand(*shape)) for n, shape in kinds.items()}
        asked = [options[n].requires_grad_() for n in needed]
        gpu.launches.clear()
        out = attention(q, k, v, **options)
        *grads, dv = torch.autograd.grad(out, (*asked, v), dout)
        assert [x.shape for x in (*grads, dv)] == [x.shape for x in (*asked, v)]
        fields: dict[str, int] = {}
        for *_, params in gpu.launches:
            fields |= {n: int(params[n]) for n in ("dv", "dsinks", "dbias") if params[n]}
        there = {f"d{n}": x.data_ptr() for n, x in zip(needed, grads, strict=True)}
        assert fields == there | {"dv": dv.data_ptr()}
        for n, x in zip(needed, grads, strict=True):
            assert n != "bias" or not x.any()  # empty tiles are not written
    assert names.count("backward") == 3


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_the_alignment_of_what_is_for_pairs_is_looked_at(
    gpu: Machine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = on_gpu(torch.zeros(1, 1, 56, 32, dtype=torch.float16))
    whole = torch.zeros(56, 128, dtype=torch.bool if name == "mask" else torch.float16)
    size = 16 // whole.element_size()
    expected = {}
    for first in (0, 1, size // 2):
        attention(x, x, x, **{name: on_gpu(whole[:, first : first + 56])})
        expected[first] = gpu.launches[-1][:3]
    assert len({x[0] for x in expected.values()}) > 1
    names = on_arrays(monkeypatch)
    for first in (0, 1, size // 2, 1, 0):
        attention(x, x, x, **{name: on_gpu(whole[:, first : first + 56])})
        assert gpu.launches[-1][:3] == expected[first]
        assert gpu.launches[-1][-1][name] == whole.data_ptr() + first * whole.element_size()
    assert not names


def test_memory_of_the_forward_pass_is_pytorchs(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Split-KV: partial results are merged."""
    names = on_arrays(monkeypatch)
    q = on_gpu(torch.zeros(1, 8, 1, 64, dtype=torch.float16))
    k = on_gpu(torch.zeros(1, 2, 8192, 64, dtype=torch.float16))
    for _ in range(2):
        gpu.launches.clear()
        attention(q, k, k)
        gpu.allocated.clear()
    assert names == ["forward"]
    assert not gpu.allocated
    partial = {int(params["partial_out"]) for *_, params in gpu.launches}
    assert len(gpu.launches) == 2
    assert len(partial) == 1
    assert 0 not in partial


@pytest.mark.parametrize("case", ["alignment", "one array", "rows apart", "gradient"])
def test_what_addresses_decide_is_looked_at(
    gpu: Machine, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = on_arrays(monkeypatch)
    q, k, v, dout = tensors()
    for _ in range(2):
        launched(gpu, [q, k, v, dout])
    assert names == ["forward", "backward"]
    if case == "alignment":  # the layout is the same, and no row is aligned
        whole = torch.zeros(q.numel() + 1, dtype=q.dtype)
        q = on_gpu(whole[1:].view(q.shape)).requires_grad_()
    elif case == "one array":
        v = on_gpu(k).requires_grad_()
    elif case == "gradient":
        dout = on_gpu(torch.zeros(*dout.shape[:-1], 16, dtype=dout.dtype)[..., :8])
    else:
        q = on_gpu(torch.zeros(2, 4, 8, 5, dtype=q.dtype).mT).requires_grad_()
    names.clear()
    new = [] if case == "gradient" else ["forward", "backward"]
    expected, _ = launched(gpu, [q, k, v, dout])
    assert names == new
    for _ in range(SEEN_OFTEN + 1):
        names.clear()
        found, _ = launched(gpu, [q, k, v, dout])
        assert case == "rows apart" or found == expected
    # Copies are made of arrays.
    assert names == (new if case == "rows apart" else [])


def test_gradients_that_are_not_needed_are_not_given(gpu: Machine) -> None:
    for _ in range(3):
        q, k, v, dout = tensors()
        q.requires_grad_(False)
        lse = attention(q, k, v, return_lse=True)[1]
        out = attention(q, k, v)
        dk, dv = torch.autograd.grad(out, (k, v), dout)
        assert (dk.shape, dv.shape) == (k.shape, v.shape)
        # Of lse alone, too, which is another call.
        gpu.launches.clear()
        torch.autograd.grad(lse.sum(), k)
        assert any(params["dlse"] for *_, params in gpu.launches)


def test_a_table_comes_after_a_capture(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PyTorch's stream: nothing can be copied while it is captured."""
    names = on_arrays(monkeypatch)
    q = on_gpu(torch.zeros(1, 12, 3000, 8, dtype=torch.float16))
    k = on_gpu(torch.zeros(1, 2, 3000, 8, dtype=torch.float16))
    gpu.capturing = True
    for _ in range(3):
        attention(q, k, k, causal=True)
        gpu.planner.work()
    gpu.capturing = False
    for _ in range(3):
        attention(q, k, k, causal=True)
    assert names == ["forward"]
    (table,) = gpu.sent
    assert table.stream == STREAM
    assignments = [int(params["assignment"]) for *_, params in gpu.launches]
    assert assignments == [0] * 4 + [table.address] * 2
    assert gpu.uploads == []


LENGTHS = 40, 37, 52, 45  # of one size class


def numbered(n: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the tensors and options of a call whose numbers all depend on n."""
    shapes = (2, 4, n, 8), (2, 2, n + 1, 8), (2, 2, n + 1, 8), (2, 4, n, 8)
    rows = [on_gpu(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
    options = {"causal": True, "scale": 0.1 * n, "dropout_p": 0.01 * n, "seed": n}
    return [x.requires_grad_(place < 3) for place, x in enumerate(rows)], options


def test_new_numbers_need_no_arrays(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    names = on_arrays(monkeypatch)
    found = {}
    for n in LENGTHS:
        rows, options = numbered(n)
        found[n] = launched(gpu, rows, **options)[0]
    assert names == ["forward", "backward"]
    monkeypatch.setattr(eager.Call, "_by_addresses", lambda *_: None)
    for n in LENGTHS[1:]:
        rows, options = numbered(n)
        assert launched(gpu, rows, **options)[0] == found[n]
    assert names == ["forward", "backward"] * len(LENGTHS)


def test_new_numbers_of_options_that_are_tensors_need_no_arrays(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of a bias start from zeros, and have its shape; others are not computed."""
    names = on_arrays(monkeypatch)
    for needed in (("bias", "sinks"), ("sinks",), ()):
        names.clear()
        for n in (40, 38, 52, 46):  # rows of the bias are equally aligned
            q, k, v, dout = numbered(n)[0]
            options = {"bias": torch.rand(4, n, n + 1), "sinks": torch.rand(4)}
            options = {name: on_gpu(x) for name, x in options.items()}
            asked = [options[name].requires_grad_() for name in needed]
            gpu.launches.clear()
            out = attention(q, k, v, causal=True, **options)
            *grads, dv = torch.autograd.grad(out, (*asked, v), dout)
            assert [x.shape for x in (*grads, dv)] == [x.shape for x in (*asked, v)]
            fields: dict[str, int] = {}
            for *_, params in gpu.launches:
                fields |= {x: int(params[x]) for x in ("dv", "dsinks", "dbias") if params[x]}
            there = {f"d{x}": grad.data_ptr() for x, grad in zip(needed, grads, strict=True)}
            assert fields == there | {"dv": dv.data_ptr()}
            assert not any(x.any() for x in grads if x.ndim == 3)
        assert names == ["forward"] * (len(needed) == 2) + ["backward"]


def test_new_offsets_need_no_arrays(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    names = on_arrays(monkeypatch)
    for tokens in (90, 70, 80):
        heads = torch.zeros(tokens, 4, 8, dtype=torch.bfloat16)
        q, k, v = (on_gpu(heads.clone().transpose(0, 1)).requires_grad_() for _ in range(3))
        offsets = on_gpu(torch.tensor([0, 30, tokens], dtype=torch.int32))
        out = attention(q, k, v, cu_seqlens_q=offsets)
        torch.autograd.grad(out, (q, k, v), on_gpu(torch.zeros_like(out)))
        assert gpu.launches[-1][-1]["cu_seqlens_k"] == offsets.data_ptr()
    assert names == ["forward", "backward"]


def spaced(x: Any) -> Any:
    """Copy a tensor into every second row of a buffer of tokens, heads and columns."""
    B, H, N, D = x.shape
    whole = torch.zeros(B, 2 * N + 1, H, D + 8, dtype=x.dtype)
    view = on_gpu(whole[:, 1::2, :, 8:].transpose(1, 2))
    return view.requires_grad_(x.requires_grad)


@pytest.mark.parametrize("has_other_strides", [False, True])
def test_numbers_that_repeat_get_a_plan_of_their_own(
    gpu: Machine, has_other_strides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = on_arrays(monkeypatch)
    launched(gpu, numbered(40)[0])
    names.clear()
    rows = [*map(spaced, numbered(40)[0])] if has_other_strides else numbered(37)[0]
    for n in range(SEEN_OFTEN + 3):
        launched(gpu, rows)
        assert names == ["forward", "backward"] * (n >= SEEN_OFTEN)


@pytest.mark.parametrize("options", [{"kv_lengths": [9, 4]}, {"softcap": 2.0, "seed": 3}])
@pytest.mark.usefixtures("without_collector")
def test_a_call_holds_only_its_results(
    gpu: Machine, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is planned, new or repeated, and without a collection of garbage."""
    held = []
    empty = torch.empty

    def noted(*size: Any, **given: Any) -> Any:
        x = empty(*size, **given)
        held.append((x.untyped_storage()._weak_ref(), x.untyped_storage().data_ptr()))
        return x

    monkeypatch.setattr(torch, "empty", noted)
    bias = on_gpu(torch.rand(4, 5, 9)).requires_grad_()
    for n in range(SEEN_OFTEN + 3):
        gpu.allocated.clear()
        held.clear()
        results = [*both(*tensors(torch.float32), bias=bias, scale=0.1 + (n > 0), **options)]
        own = {x.untyped_storage().data_ptr() for x in results}
        alive = {at for known, at in held if not torch.UntypedStorage._expired(known)}
        assert alive == own
        results.clear()
        assert all(torch.UntypedStorage._expired(known) for known, _ in held)
        assert gpu.allocated == []  # from CuPy's pool


def test_bad_numbers_of_a_known_kind_are_refused(gpu: Machine) -> None:
    rows, options = numbered(40)
    launched(gpu, rows, **options)
    q, k, v, _ = rows
    for wrong, message in (({"scale": math.inf}, "scale"), ({"dropout_p": 1.5}, "dropout_p")):
        with pytest.raises(ValueError, match=f"{message} must be"):
            attention(q, k, v, **(options | wrong))
    with pytest.raises(ValueError, match="v must have the length of k, 41; got 40"):
        attention(q, k, on_gpu(v[:, :, 1:]), **options)


def test_results_of_operators_are_no_views_of_each_other(gpu: Machine) -> None:
    """PyTorch forbids such views; repeated calls of operators run on CuPy arrays."""
    q, k, v, dout = map(on_gpu, tensors())
    given = dict.fromkeys(operators.INPUTS) | {"q": q, "k": k, "v": v, "aux": []}
    given |= {"dropout_p": 0.0, "backend": "auto", "deterministic": True}
    inputs = tuple(given.values())
    for _ in range(3):
        out, lse = operators.forward(*inputs)
        grads = operators.backward(dout, None, out, lse, ["q", "k", "v"], *inputs)
        storages = {x.untyped_storage().data_ptr() for x in (out, lse, *grads)}
        assert len(storages) == 5
    assert len(gpu.launches) > 3  # on the GPU
