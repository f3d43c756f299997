"""What only tensors can get wrong; ``tests/contract/test_bad_calls.py`` has the rest."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tileattn.errors import UnsupportedError  # noqa: E402 - PyTorch may be absent
from tileattn.torch import attention  # noqa: E402 - as above


def drawn(*shapes: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    options = {"generator": generator, "dtype": torch.float64}
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


def refused(**changed: Any) -> Callable[[], Any]:
    q, k, v = drawn((2, 5, 8), (2, 5, 8), (2, 5, 8))
    return lambda: attention(**({"q": q, "k": k, "v": v} | changed))


def scored(s: Any, _b: Any, h: Any, _i: Any, j: Any, table: Any) -> Any:
    return s + table[h, j]


X = torch.zeros(2, 5, 8, dtype=torch.float64)
F8 = X.to(torch.float8_e4m3fn)
NESTED = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged)
NEEDED = torch.zeros(2, requires_grad=True)


def with_seed(seed: Any) -> Callable[[], Any]:
    return refused(dropout_p=0.5, seed=seed)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (refused(q=np.zeros((5, 8))), TypeError, r"q must be a torch.Tensor; got ndarray"),
        (
            refused(k=X.to_sparse()),
            UnsupportedError,
            "k must be .*; got layout torch.sparse_coo.*to_dense",
        ),
        (
            refused(v=X.to("meta")),
            ValueError,
            r"v must be on the device of q, cpu; got a tensor on meta",
        ),
        (refused(q=X.long()), TypeError, "q must have dtype .*; got int64"),
        (refused(mask=torch.ones(5, 5)), TypeError, "mask must have dtype bool; .*bias="),
        (refused(bias=[1.0]), TypeError, "bias must be a torch.Tensor; got list"),
        (refused(is_causal=True), TypeError, "did you mean 'causal'"),
        (
            refused(aux=(np.zeros(2),), score_mod=scored),
            TypeError,
            r"aux\[0\] must be a torch.Tensor; got ndarray",
        ),
        (refused(backend="cupy"), (TypeError, RuntimeError), "cupy"),
        (refused(deterministic=X), TypeError, r"deterministic (is|must be) "),
        (refused(return_lse=X), TypeError, r"return_lse (is|must be) "),
        (
            refused(seed=NESTED),
            UnsupportedError,
            "seed must be a dense tensor; got a nested tensor",
        ),
        (refused(window=torch.tensor([1, 2])), TypeError, r"window (is|must be) "),
        (refused(aux=X, score_mod=scored), TypeError, r"aux (is|must be) "),
        (with_seed(torch.tensor(-1)), ValueError, r"seed (is|must be) "),
        (with_seed(torch.tensor(1.9)), TypeError, r"seed (is|must be) "),
        (with_seed(torch.tensor(True)), TypeError, r"seed (is|must be) "),
        (with_seed(torch.tensor([1, 2])), ValueError, r"seed must be one integer; .*\(2,\)"),
        (refused(q_offset=1 << 63), TypeError, r"q_offset (must be|is)"),
        (refused(alibi_slopes=NEEDED), UnsupportedError, r"alibi_slopes requires.*aux=\(slopes"),
        (refused(scale=NEEDED.sum()), UnsupportedError, "scale requires a gradient.*q \\* scale"),
        (refused(softcap=NEEDED.sum()), UnsupportedError, "softcap requires a gradient"),
        (refused(q=F8, k=F8, v=F8), TypeError, "q must have dtype float16, .*float8_e4m3fn"),
        (refused(kv_lengths=F8), TypeError, "kv_lengths must have dtype int32 or int64"),
        (refused(aux=(F8,), score_mod=scored), TypeError, r"aux\[0\] must have dtype bool, "),
        (refused(q=torch.nn.UninitializedParameter()), UnsupportedError, "q must be .*materialize"),
    ],
)
def test_what_is_not_accepted_is_named(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_slopes_as_aux_have_a_gradient() -> None:
    """The error message suggests this remedy."""
    q, k, v, slopes = drawn((2, 3, 4), (2, 5, 4), (2, 5, 4), (2,))

    def remedy(s: Any, _b: Any, h: Any, i: Any, j: Any, slopes: Any) -> Any:
        return s - slopes[h] * abs(i - j)

    out = attention(q, k, v, score_mod=remedy, aux=(slopes,), q_offset=0)
    torch.testing.assert_close(out, attention(q, k, v, alibi_slopes=slopes.detach(), q_offset=0))
    assert torch.autograd.grad(out.cos().sum(), slopes)[0].abs().min() > 0
    with torch.no_grad():
        torch.testing.assert_close(out, attention(q, k, v, alibi_slopes=slopes, q_offset=0))


def test_a_known_call_refuses_what_a_new_one_does() -> None:
    q, k, v, slopes = drawn((2, 3, 4), (2, 5, 4), (2, 5, 4), (2,))
    for _ in range(2):
        attention(q, k, v, alibi_slopes=slopes.detach())
    with pytest.raises(UnsupportedError, match="alibi_slopes requires a gradient"):
        attention(q, k, v, alibi_slopes=slopes)


def test_compiled_calls_refuse_what_others_do() -> None:
    q, k, v = (x.detach() for x in drawn((2, 5, 8), (2, 5, 8), (2, 5, 8)))
    torch._dynamo.reset()
    fast = torch.compile(
        lambda **options: attention(q, k, v, **options), backend="aot_eager", fullgraph=True
    )
    cases: list[tuple[Any, str]] = [
        ({"dropout_p": 0.5, "seed": -1}, "seed must be"),
        ({"dropout_p": 0.5, "seed": torch.tensor(-1)}, "seed must be"),
        ({"dropout_p": 1.5}, "dropout_p must be"),
        ({"softcap": -1.0}, "softcap must be"),
        ({"alibi_slopes": NEEDED}, "alibi_slopes requires a gradient"),
    ]
    for options, message in cases:
        with pytest.raises(Exception, match=message):
            fast(**options)


@pytest.mark.parametrize("name", ["q", "bias", "mask"])
def test_a_causal_bias_is_named(name: str) -> None:
    from torch.nn.attention.bias import causal_upper_left

    with pytest.raises(UnsupportedError, match=f"{name} must be a plain .*CausalBias.*causal=True"):
        refused(**{name: causal_upper_left(5, 5)})()


def test_a_distributed_tensor_is_named() -> None:
    """Its memory holds only the local part."""
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = distribute_tensor(X, DeviceMesh("cpu", [0]), [Replicate()])
        with pytest.raises(UnsupportedError, match=r"k must be a plain .*DTensor.*to_local"):
            attention(X, x, X)
    finally:
        dist.destroy_process_group()


def test_freed_memory_is_not_read() -> None:
    x, freed = torch.zeros(2, 5, 8), torch.zeros(2, 5, 8)
    attention(x, x + 1, x)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"a tensor of shape \(2, 5, 8\) must have memory"):
        attention(x, freed, x)
