"""``score_mod`` and ``mask_mod`` on tensors: read once, by the call, and under compilers."""

import functools
import gc
import io
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tileattn.expressions.nodes import from_text

torch = pytest.importorskip("torch")

from tests.torch.graphs import graphs_of  # noqa: E402 - PyTorch may be absent
from tileattn.torch import attention  # noqa: E402 - PyTorch may be absent

Setter = Callable[[int], None]
width = 0
settings = {"widths": [0]}


class Config:
    width = 0


class Layer(torch.nn.Module):  # type: ignore[misc,name-defined]  # PyTorch is untyped here
    def __init__(self) -> None:
        super().__init__()
        self.width, self.soon = 0, 0

    @property
    def twice(self) -> int:
        return 2 * self.width

    def near(self, *indices: Any, scale: int = 1) -> Any:
        return abs(indices[-2] - indices[-1]) < self.width * scale

    def forward(self, q: Any) -> Any:
        return attention(q, q, q, mask_mod=lambda b, h, i, j: abs(i - j) < self.width)


layer = Layer()


def by_its_attribute(b: Any, h: Any, i: Any, j: Any) -> Any:
    return abs(i - j) < by_its_attribute.width  # type: ignore[attr-defined]  # set by the test


def masked(mask_mod: Any) -> Any:
    """Return a call that creates its mask function each time."""
    return lambda q: attention(q, q, q, mask_mod=mask_mod())


def sets_what_it_reads(q: Any) -> Any:
    layer.width = layer.soon
    return attention(q, q, q, mask_mod=lambda b, h, i, j: abs(i - j) < layer.width)


def recursive(q: Any) -> Any:
    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any, n: int = 2) -> Any:
        return s if n == 0 else score_mod(s * layer.width, b, h, i, j, n - 1)

    return attention(q, q, q, score_mod=score_mod)


def of_python(q: Any) -> Any:
    """Read numbers in places that need Python numbers."""

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        from numpy import tanh

        for n in range(layer.width):
            s = s + math.log(layer.width) * n
        return tanh(s) if layer.width > 5 else np.where(i > j, s, settings["widths"][-1])

    return attention(q, q, q, score_mod=score_mod)


def in_a_loop(q: Any) -> Any:
    x = q
    for slope in (0.5, layer.width):
        x = attention(x, q, q, score_mod=lambda s, b, h, i, j: s - slope * abs(i - j))  # noqa: B023 - on purpose
    return x


def set_layer(n: int) -> None:
    layer.width = layer.soon = n


def set_global(n: int) -> None:
    globals()["width"] = n


def set_settings(n: int) -> None:
    settings["widths"] = [0, n]


WAYS: dict[str, tuple[Any, Setter]] = {
    "global": (masked(lambda: lambda b, h, i, j: abs(i - j) < width), set_global),
    "class": (
        masked(lambda: lambda b, h, i, j: abs(i - j) < Config.width),
        lambda n: setattr(Config, "width", n),
    ),
    "self": (layer, set_layer),
    "property": (masked(lambda: lambda b, h, i, j: abs(i - j) < layer.twice), set_layer),
    "method": (masked(lambda: lambda b, h, i, j: layer.near(b, h, i, j, scale=2)), set_layer),
    "bound method": (masked(lambda: layer.near), set_layer),
    "container": (
        masked(lambda: lambda b, h, i, j: abs(i - j) < settings["widths"][-1]),
        set_settings,
    ),
    "its attribute": (
        masked(lambda: by_its_attribute),
        lambda n: setattr(by_its_attribute, "width", n),
    ),
    "default": (masked(lambda: lambda b, h, i, j, w=layer.width: abs(i - j) < w), set_layer),
    "partial": (
        masked(lambda: functools.partial(lambda w, b, h, i, j: abs(i - j) < w, layer.width)),
        set_layer,
    ),
    "set in the program": (sets_what_it_reads, set_layer),
    "recursive": (recursive, set_layer),
    "of Python": (of_python, set_layer),
    "loop": (in_a_loop, set_layer),
}


def drawn(n: int = 8, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, 2, n, 8), generator=generator, dtype=torch.float64).requires_grad_()


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# --- read once ----------------------------------------------------------------------------------


def test_the_gradients_of_a_loop_are_those_of_its_functions() -> None:
    def one_by_one(q: Any) -> Any:
        def decaying(slope: float) -> Any:
            return lambda s, b, h, i, j: s - slope * abs(i - j)

        return attention(attention(q, q, q, score_mod=decaying(0.5)), q, q, score_mod=decaying(3))

    set_layer(3)
    q = drawn()
    for transformed in (lambda f: f, lambda f: lambda q: torch.vmap(f)(q[None])[0]):
        found, expected = (transformed(f)(q) for f in (in_a_loop, one_by_one))
        same(found, expected)
        same(*(torch.autograd.grad(x.sum(), q)[0] for x in (found, expected)))


@pytest.mark.parametrize("name", WAYS)
def test_the_backward_pass_is_that_of_what_forward_has_read(name: str) -> None:
    call, change = WAYS[name]
    q, grads = drawn(), []
    for later in (5, 7):
        change(5)
        out = call(q)
        change(later)
        grads.append(torch.autograd.grad(out.square().sum(), q)[0])
    same(*grads)


@pytest.mark.slow
def test_nothing_that_a_function_reads_is_kept_alive() -> None:
    gone, q = [], drawn()
    for n in range(3):
        mine = Layer()
        mine.width = n + 1
        mine(q).sum().backward()
        attention(q, q, q, mask_mod=mine.near)
        gone.append(weakref.ref(mine))
    del mine
    gc.collect()
    assert [x() for x in gone] == [None] * 3


TABLE = torch.linspace(-1, 1, 80, dtype=torch.float64).reshape(2, 40).requires_grad_()
FACTOR = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
IDS = torch.arange(40) // 3
NUMBERS = np.arange(40) // 3


def of_captured(q: Any, table: Any = TABLE) -> Any:
    n = q.shape[2]
    return attention(
        *(q, q, q),
        score_mod=lambda s, b, h, i, j: s * FACTOR + table[h, i - j] * (j < n),
        mask_mod=lambda b, h, i, j: (IDS[i] >= IDS[j]) & (NUMBERS[j] < IDS.shape[0]),
    )


def of_aux(q: Any) -> Any:
    n = q.shape[2]
    return attention(
        *(q, q, q),
        score_mod=lambda s, b, h, i, j, f, t, k, m: s * f + t[h, i - j] * (j < n),
        mask_mod=lambda b, h, i, j, f, t, k, m: (k[i] >= k[j]) & (m[j] < 40),
        aux=(FACTOR, TABLE, IDS, torch.as_tensor(NUMBERS)),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_captured_tensors_are_arrays_with_gradients(is_compiled: bool) -> None:
    run, graphs = graphs_of(of_captured, fullgraph=True) if is_compiled else (of_captured, [])
    counts = []
    for n in (8, 12, 17):
        q = drawn(n)
        found, expected = run(q), of_aux(q)
        counts.append(len(graphs))
        same(found, expected)
        learned = q, TABLE, FACTOR
        for one, other in zip(
            *(torch.autograd.grad(x.square().sum(), learned) for x in (found, expected)),
            strict=True,
        ):
            same(one, other)
    assert counts[1] == counts[2]  # no graph for each size


# --- compiled -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("name", WAYS)
def test_a_program_is_made_again_where_what_a_function_reads_changes(name: str) -> None:
    call, change = WAYS[name]
    fast, graphs = graphs_of(lambda q: call(q), fullgraph=True)  # noqa: PLW0108 - Dynamo's frame
    for n in (5, 7, 5):
        change(n)
        q = drawn()
        found, expected = fast(q), call(q)
        same(found, expected)
        change(n + 1)
        same(*(torch.autograd.grad(x.square().sum(), q)[0] for x in (found, expected)))
    assert len(graphs) <= 2


def of_number(q: Any, x: Any) -> Any:
    return attention(q, q, q, score_mod=lambda s, b, h, i, j: s - x * abs(i - j))


def of_size(q: Any, _: Any) -> Any:
    n = q.shape[2]
    return attention(q, q, q, mask_mod=lambda b, h, i, j: (i >= j) | (j < n // 2))


def of_both(q: Any, x: Any) -> Any:
    n = 2 * q.shape[2]
    return attention(
        *(q, q, q),
        score_mod=lambda s, b, h, i, j, t: s * x - t[j] * abs(i - j) / n,
        mask_mod=lambda b, h, i, j, t: (i - j) * x < n,
        aux=(q[0, 0, :, 0],),
    )


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("is_dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "call",
    [pytest.param(of_number, marks=pytest.mark.slow), of_size, of_both],
)
def test_numbers_that_a_program_keeps_open_are_compiled_once(call: Any, is_dynamic: bool) -> None:
    """The numbers are sizes, and integer or float arguments."""
    fast, graphs = graphs_of(call, fullgraph=True)
    for x in (3, 5, 2, 7, 0.5, 1.5, 4.5):
        q = drawn(2 * int(x) + 9)
        if is_dynamic:
            torch._dynamo.mark_dynamic(q, 2)
        found, expected = fast(q, x), call(q, x)
        # The program reads x from a float64 array, and a plain call has it as a constant that is
        # folded: both are right to the last bits of float64, in a different order.
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
        grads = (torch.autograd.grad(y.square().sum(), q)[0] for y in (found, expected))
        torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)
    assert len(graphs) <= 4  # of an integer and a float, at first and once more


def of_counter(q: Any) -> Any:
    calls = 0

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        nonlocal calls
        calls += layer.width
        return s * calls

    return attention(q, q, q, score_mod=score_mod)


def of_import(q: Any) -> Any:
    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        from tests.torch import test_functions

        return s * test_functions.width

    return attention(q, q, q, score_mod=score_mod)


@pytest.mark.usefixtures("_fresh_compiler")
def test_without_names_of_dynamo_functions_are_read_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tileattn.torch.dynamo", None)  # its import fails
    same(torch.compile(of_captured, backend="eager")(drawn()), of_captured(drawn()))


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(("call", "change"), [(of_counter, set_layer), (of_import, set_global)])
def test_what_cannot_be_compiled_is_named_or_runs_outside(call: Any, change: Setter) -> None:
    change(3)
    message = r"`score_mod` cannot be compiled: .*; .*pass others as aux=\(tensor, \.\.\.\)"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(call, backend="eager", fullgraph=True)(drawn())
    fast = torch.compile(call, backend="eager")
    for n in (3, 5, 3):
        change(n)
        same(fast(drawn()), call(drawn()))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("is_strict", [False, True])
def test_an_exported_program_holds_its_functions(is_strict: bool) -> None:
    set_layer(3)
    (q,) = (drawn().detach(),)
    program = torch.export.export(layer, (q,), strict=is_strict)
    expected = layer(q)
    stored = io.BytesIO()
    torch.export.save(program, stored)
    set_layer(5)
    stored.seek(0)
    from_text.cache_clear()
    same(torch.export.load(stored).module()(q), expected)


class OfSize(torch.nn.Module):  # type: ignore[misc,name-defined]  # PyTorch is untyped here
    def forward(self, q: Any) -> Any:
        return of_size(q, None)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_size_is_symbolic_in_an_exported_program(is_strict: bool) -> None:
    (q,) = (drawn().detach(),)
    shapes = ({2: torch.export.Dim("N")},)
    program = torch.export.export(OfSize(), (q,), dynamic_shapes=shapes, strict=is_strict).module()
    for n in (8, 12, 21):
        q = drawn(n).detach()
        same(program(q), of_size(q, None))
