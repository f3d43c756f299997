"""Compiled programs take new sizes and numbers, as those of PyTorch's attention do."""

from collections.abc import Callable, Sequence
from operator import le
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402 - PyTorch may be absent
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402 - as above

import tileattn.torch as tt  # noqa: E402 - PyTorch may be absent
from tests.torch.graphs import graphs_of  # noqa: E402 - as above
from tests.torch.test_eager import Seen  # noqa: E402 - as above
from tileattn.torch import operators  # noqa: E402 - as above
from tileattn.torch.flash_attn import flash_attn_varlen_func  # noqa: E402 - as above
from tileattn.torch.inputs import inputs_of  # noqa: E402 - as above

pytestmark = pytest.mark.usefixtures("_fresh_compiler")

LENGTHS = 12, 20, 17, 33, 7
Loop = Sequence[Sequence[Any]]


def counts(call: Callable[..., Any], loop: Loop, *, dynamic: bool | None = None) -> list[int]:
    """Return the number of graphs after each call of a compiled function."""
    torch._dynamo.reset()
    fast, graphs = graphs_of(call, dynamic=dynamic)
    found = []
    for given in loop:
        torch.testing.assert_close(fast(*given), call(*given))
        found.append(len(graphs))
    return found


def rows(B: int = 2, Nq: int = 12, Nk: int = 15) -> list[Any]:
    return [torch.randn(B, H, N, 8) for H, N in ((4, Nq), (2, Nk), (2, Nk))]


def masked(n: int) -> tuple[Any, ...]:
    return *rows(Nq=n, Nk=n + 1), torch.rand(2, 1, n, n + 1) < 0.9


SIZES: dict[str, Loop] = {
    "lengths": [rows(Nq=n, Nk=n) for n in LENGTHS],
    "batches": [rows(B, n, n + 3) for B, n in zip((2, 3, 5, 4, 7), LENGTHS, strict=True)],
    "a growing cache": [rows(Nq=1, Nk=n) for n in range(12, 17)],
    "masks": [masked(n) for n in LENGTHS],
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", SIZES)
def test_new_sizes_do_not_recompile_more_often_than_sdpa(name: str, dynamic: bool | None) -> None:
    loop = SIZES[name]
    theirs = counts(
        lambda q, k, v, mask=None: sdpa(q, k, v, mask, enable_gqa=True), loop, dynamic=dynamic
    )
    ours = counts(
        lambda q, k, v, mask=None: tt.attention(q, k, v, mask=mask), loop, dynamic=dynamic
    )
    assert all(map(le, ours, theirs))


def test_the_drop_in_does_not_recompile_more_often_than_sdpa() -> None:
    given: dict[str, Any] = {"is_causal": True, "dropout_p": 0.0, "enable_gqa": True}
    loop = SIZES["lengths"]
    theirs = counts(lambda *x: sdpa(*x, **given), loop)
    ours = counts(lambda *x: tt.scaled_dot_product_attention(*x, **given), loop)
    assert all(map(le, ours, theirs))


def test_a_causal_program_for_as_many_keys_as_queries_reads_no_offset() -> None:
    """A tensor on the CPU would keep a program on the GPU out of CUDA graphs."""
    fast, graphs = graphs_of(lambda q: tt.scaled_dot_product_attention(q, q, q, is_causal=True))
    fast(torch.randn(2, 4, 12, 8))
    (graph,) = graphs
    assert not any("full" in str(node.target) for node in graph.graph.nodes)


def packed(n: int) -> list[Any]:
    return [torch.randn(H, n, 8) for H in (4, 2, 2)]


OTHERS: dict[str, tuple[Callable[..., Any], Loop]] = {
    "seeds": (
        lambda seed, *x: tt.attention(*x, dropout_p=0.1, seed=seed),
        [(seed, *rows()) for seed in (3, 4, 90, 1 << 40)],
    ),
    "windows": (
        lambda left, *x: tt.attention(*x, window=(left, 0)),
        [(left, *rows()) for left in (2, 3, 7, 5)],
    ),
    "lists of lengths": (
        lambda lengths, *x: tt.attention(*x, kv_lengths=lengths),
        [([n, 2 * n], *rows()) for n in (3, 4, 7, 5)],
    ),
    "lists of offsets": (
        lambda starts, *x: tt.attention(*x, cu_seqlens_q=starts, causal=True),
        [([0, 5, n], *packed(n)) for n in LENGTHS],
    ),
    "tensors of offsets": (
        lambda starts, n, q, k, v: flash_attn_varlen_func(
            q, k, v, starts, starts, n, n, causal=True
        ),
        [
            (torch.tensor([0, 5, n]), n - 5, *(x.transpose(0, 1) for x in packed(n)))
            for n in LENGTHS
        ],
    ),
    "an annealed temperature": (
        lambda t, *x: tt.attention(*x, score_mod=lambda s, *_: s * t),
        [(1.0 - 0.1 * n, *rows()) for n in range(1, 5)],
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_new_numbers_recompile_once(name: str) -> None:
    """The first program is for the first numbers alone; the second one takes all others."""
    call, loop = OTHERS[name]
    assert counts(call, loop)[-1] <= 2


@pytest.mark.parametrize(
    ("options", "is_safe"),
    [
        ({"causal": True}, True),
        ({"kv_lengths": "cuda"}, True),
        ({"kv_lengths": "cpu"}, False),
        ({"dropout_p": 0.5, "seed": 3}, False),
    ],
    ids=str,
)
def test_operators_that_read_the_host_stay_out_of_cuda_graphs(
    options: dict[str, Any], is_safe: bool
) -> None:
    """A graph would repeat the values of its capture."""
    unsafe = torch.Tag.cudagraph_unsafe
    with FakeTensorMode(), Seen() as seen:
        if "kv_lengths" in options:
            options = {"kv_lengths": torch.ones(2, dtype=torch.int32, device=options["kv_lengths"])}
        q = torch.randn(2, 4, 12, 8, device="cuda")
        out, lse = tt.attention(q, q, q, return_lse=True, **options)
        inputs = inputs_of((q, q, q), "auto", False, options)  # autograd would look for a GPU
        operators.call_backward(out, None, out, lse, ["q"], *inputs)
    ours = [x for x in seen.operators if x.namespace == "tileattn"]
    assert len(ours) == 2
    assert [unsafe not in x.tags for x in ours] == [is_safe, is_safe]
