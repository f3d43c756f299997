"""Calls that bypass the dispatcher: what must still see them, and what earlier calls may share."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - PyTorch may be absent

import tileattn  # noqa: E402 - as above
from tileattn.call.prepared import CALLS  # noqa: E402 - as above
from tileattn.torch import attention, eager, inputs, tensors  # noqa: E402 - as above

SHAPES = (2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8)


def drawn(seed: int = 0, dtype: Any = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (*SHAPES, SHAPES[0])
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def both(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> tuple[Any, ...]:
    out = attention(q, k, v, **options)
    return out, *torch.autograd.grad(out, (q, k, v), dout)


def same(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


class Seen(TorchDispatchMode):  # type: ignore[misc]  # PyTorch is untyped here
    """Records the operators that run inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    @property
    def names(self) -> list[str]:
        return [str(x) for x in self.operators]

    def __torch_dispatch__(self, f: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(f)
        return f(*args, **(kwargs or {}))


# --- what must see a call -------------------------------------------------------------------------

MASK = torch.ones(5, 9, dtype=torch.bool).tril()
OPTIONS: list[dict[str, Any]] = [{}, {"causal": True, "q_offset": 0}, {"mask": MASK}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "values", "tensors"])
def test_modes_see_both_operators_also_of_calls_that_are_known(options: dict[str, Any]) -> None:
    given = drawn()
    expected = [both(*given, **options) for _ in range(2)][1]
    with Seen() as seen:
        found = both(*given, **options)
    same(found, expected)
    ours = [name for name in seen.names if name.startswith("tileattn.")]
    assert ours == ["tileattn.forward.default", "tileattn.backward.default"]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "values", "tensors"])
def test_outside_of_modes_nothing_goes_through_the_dispatcher(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "tileattn", None)
    for _ in range(2):
        both(*drawn(), **options)
        with torch.no_grad():
            attention(*drawn()[:3], **options)


def test_subclasses_see_the_operator() -> None:
    class Counted(torch.Tensor):  # type: ignore[misc,name-defined]  # as above
        names: list[str] = []  # noqa: RUF012 - of all instances

        @classmethod
        def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.names.append(str(f))
            return super().__torch_function__(f, types, args, kwargs or {})

    q, k, v, _ = (x.detach() for x in drawn())
    for _ in range(2):
        Counted.names.clear()
        out = attention(q.as_subclass(Counted), k, v)
        assert type(out) is Counted
        assert "tileattn.forward.default" in Counted.names or "tileattn.forward" in Counted.names
    same([out.as_subclass(torch.Tensor)], [attention(q, k, v)])


def test_a_trace_calls_the_operator() -> None:
    given, others = ([x.detach() for x in drawn(seed)[:3]] for seed in (0, 1))
    expected = attention(*others)
    attention(*given)
    traced = torch.jit.trace(attention, tuple(given))
    same([traced(*others)], [expected])


def test_negations_that_are_left_to_do_are_done() -> None:
    q, k, v, dout = drawn()
    expected = both(q, k, v, dout)
    same([attention(torch._neg_view(-q), k, v)], expected[:1])
    out = attention(q, k, v, mask=torch.ones(9, dtype=torch.bool))
    same(torch.autograd.grad(out, (q, k, v), torch._neg_view(-dout)), expected[1:])
    bias = torch.randn(5, 9)
    found = attention(q, k, v, bias=torch._neg_view(-bias))
    same([found], [attention(q, k, v, bias=bias)])


def test_batches_of_gradients_are_one_for_each() -> None:
    q, k, v, dout = drawn()
    out = attention(q, k, v)
    douts = torch.stack([dout, 2 * dout, dout + 1])

    def pullback(x: Any) -> Any:
        return torch.autograd.grad(out, (q, k, v), x, retain_graph=True)

    found, each = torch.vmap(pullback)(douts), map(pullback, douts)
    same(found, map(torch.stack, zip(*each, strict=True)))


def test_other_tensors_than_the_saved_ones_may_come_back() -> None:
    """Hooks may store tensors elsewhere, and return them with other strides."""
    q, k, v, dout = drawn()
    expected = both(q, k, v, dout)
    q, k, v = (x.detach().mT.contiguous().mT.requires_grad_() for x in (q, k, v))
    same(both(q, k, v, dout), expected)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda x: x):
        same(both(q, k, v, dout), expected)


def test_a_default_device_is_no_mode_that_looks_at_operators() -> None:
    q, k, v, dout = drawn()
    expected = both(q, k, v, dout)
    with torch.device("meta"):
        assert eager.is_eager()
        same(both(q, k, v, dout), expected)
        with Seen():
            assert not eager.is_eager()


# --- what is shared -------------------------------------------------------------------------------


def test_equal_values_of_another_type_are_checked() -> None:
    q, k, v, _ = drawn()
    attention(q, k, v, causal=True, window=(1, 0), scale=1.0)
    with pytest.raises(TypeError, match="causal must be True or False"):
        attention(q, k, v, causal=1, window=(1, 0), scale=1.0)
    with pytest.raises(TypeError, match="window must be"):
        attention(q, k, v, causal=True, window=(True, 0), scale=1.0)
    with pytest.raises(TypeError, match="deterministic"):
        attention(q, k, v, deterministic=1)  # type: ignore[arg-type]  # what is tested


def test_calls_are_checked_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    check = inputs._check
    monkeypatch.setattr(inputs, "_check", lambda *given: checked.append(check(*given) or 1))
    CALLS.clear()
    q, k, v, _ = drawn()
    calls: list[tuple[Any, dict[str, Any]]] = [
        (k, {}),
        (torch.nn.Parameter(k.detach()), {}),
        (k[:, :, :-1], {}),
        (k, {"scale": 0.5, "kv_lengths": [3, 9]}),
        (k[:, :, 1:], {"scale": 0.7, "kv_lengths": [8, 2]}),
    ]
    for x, options in calls:
        out, _ = tileattn.forward(*(y.detach().numpy() for y in (q, x, x)), **options)
        same([attention(q, x, x, **options)], [torch.from_numpy(out)])
    assert len(checked) == 2
    for _ in range(2):
        with pytest.raises(TypeError, match="k must have the dtype of q, float32; got float64"):
            attention(q, k.detach().double(), v)
    assert len(checked) == 4


def test_the_backward_pass_is_for_what_the_call_was_given() -> None:
    q, k, v, dout = drawn()
    expected = both(q, k, v, dout, kv_lengths=(3, 9), dropout_p=0.5, seed=7)
    for kv_lengths in ([3, 9], np.array([3, 9])):
        seed = torch.tensor([7])
        out = attention(q, k, v, kv_lengths=kv_lengths, dropout_p=0.5, seed=seed)
        kv_lengths[0] = seed[0] = 8
        same((out, *torch.autograd.grad(out, (q, k, v), dout)), expected)


def test_a_default_backend_and_new_backends_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the first call of a kind, and for calls with other numbers."""
    asked = []
    forward, first_run = tileattn.forward, tensors.first_run

    def watched(*given: Any, **options: Any) -> Any:
        asked.append(tileattn.explain(*given, **options).backend)
        return forward(*given, **options)

    def watched_first(known: Any, *given: Any) -> Any:
        found = first_run(known, *given)
        asked.append(known.call.backend.name)
        return found

    CALLS.clear()
    monkeypatch.setattr(tileattn, "forward", watched)
    monkeypatch.setattr(eager, "first_run", watched_first)
    given = drawn()[:3]
    for name in ("numpy", "llvm"):
        monkeypatch.setenv("TILEATTN_BACKEND", name)
        for scale in (0.5, 0.7):
            attention(*given, scale=scale)
    assert asked == ["numpy", "numpy", "llvm", "llvm"]


def test_calls_with_new_numbers_have_the_bits_of_first_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the CPU they need neither validation nor the public function."""
    q, k, v, _ = drawn()
    steps: list[tuple[int, dict[str, Any]]] = [
        (n, {"scale": n / 10, "kv_lengths": torch.tensor([n, n - 1])}) for n in (2, 3, 4, 5)
    ]

    def output(n: int, options: dict[str, Any]) -> Any:
        return attention(q, k[:, :, :n], v[:, :, :n], **options)

    expected = []
    for step in steps:
        CALLS.clear()
        expected.append(output(*step))
    CALLS.clear()
    output(*steps[0])
    monkeypatch.setattr(tileattn, "forward", None)
    for step, same in zip(steps[1:], expected[1:], strict=True):
        assert torch.equal(output(*step), same)


def test_deterministic_algorithms_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    backward = tileattn.backward

    def watched(*given: Any, **options: Any) -> Any:
        asked.append(options["deterministic"])
        return backward(*given, **options)

    monkeypatch.setattr(tileattn, "backward", watched)
    for wanted in (False, True, False):
        torch.use_deterministic_algorithms(wanted)
        try:
            both(*drawn())
        finally:
            torch.use_deterministic_algorithms(mode=False)
    assert asked == [False, True, False]


def test_repeated_calls_on_the_cpu_run_by_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEATTN_BACKEND", "llvm")
    q, k, v, dout = drawn()
    expected = both(q, k, v, dout, causal=True)
    asked: list[Any] = []
    forward = tileattn.forward

    def watched(*given: Any, **options: Any) -> Any:
        asked.append(options)
        return forward(*given, **options)

    monkeypatch.setattr(tileattn, "forward", watched)
    same(both(q, k, v, dout, causal=True), expected)
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    same(both(q, k, v, dout, causal=True), expected)
    assert not asked
    memory = bytearray(b"0" + q.detach().numpy().tobytes())
    unaligned = torch.frombuffer(memory, dtype=torch.float32, offset=1).view(q.shape)
    same([attention(unaligned, k, v, causal=True)], expected[:1])
    assert len(asked) == 1
    empty = torch.zeros(2, 4, 0, 8)
    for _ in range(2):
        assert attention(empty, k, v).shape == empty.shape
