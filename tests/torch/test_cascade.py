"""Cascades on tensors, beside the same calls on arrays."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tileattn  # noqa: E402 - PyTorch may be absent
from tests.shared_pages import SharedCache, shared_cache  # noqa: E402 - as above
from tests.torch.graphs import graphs_of  # noqa: E402 - as above
from tests.torch.test_cuda import elsewhere  # noqa: E402 - as above
from tests.torch.test_serving import Ignored  # noqa: E402 - as above
from tileattn.dtypes import CACHE_DTYPES, DTYPES  # noqa: E402 - as above
from tileattn.errors import UnsupportedError  # noqa: E402 - as above
from tileattn.torch import cascade  # noqa: E402 - as above
from tileattn.torch.tensors import array_of, tensor_of  # noqa: E402 - as above


@pytest.fixture(params=["eager", "dispatched", "compiled"])
def way(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Call plainly, through the dispatcher, or in a compiled program."""
    if request.param == "compiled":
        torch._dynamo.reset()
        yield torch.compile(cascade, backend="aot_eager", fullgraph=True)
        torch._dynamo.reset()
    elif request.param == "dispatched":
        with Ignored():
            yield cascade
    else:
        yield cascade


def tensor(x: Any) -> Any:
    """Make a tensor of a NumPy array, with its memory."""
    if isinstance(x, np.ndarray) and x.dtype == CACHE_DTYPES[0]:
        return torch.from_numpy(x.view(np.uint8)).view(torch.float8_e4m3fn)
    return tensor_of(x) if isinstance(x, np.ndarray) else x


def call(made: SharedCache, **options: Any) -> dict[str, Any]:
    given = {"q": made.q, "k": made.k_pages, "v": made.v_pages, **made.paged}
    return given | {"shared_lengths": made.shared_lengths} | options


def compare(found: Any, given: dict[str, Any]) -> None:
    expected = tileattn.cascade(**given)
    assert isinstance(found, tileattn.Attention)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array_of(x), y, strict=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_match_arrays(way: Any, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    made = shared_cache(rng, [3, 1], [6, 5, 9, 20], 4, Nq=5, dtype=dtype)
    tree = np.tril(np.ones((1, 5, 5), bool))
    sinks = np.ones(4, np.float64 if dtype == np.float64 else np.float32)
    more: dict[str, Any] = {"tree_mask": tree, "sinks": sinks, "softcap": 3.0, "scale": 0.2}
    for options in ({}, {"causal": True}, more):
        given = call(made, **options)
        compare(way(**{name: tensor(x) for name, x in given.items()}), given)


@pytest.mark.parametrize("kind", CACHE_DTYPES, ids=str)
def test_pages_of_8_bits(way: Any, kind: Any) -> None:
    made = shared_cache(np.random.default_rng(1), [2], [1, 7, 3], 8, kv_dtype=kind)
    for options in ({}, {"k_descale": 0.01, "v_descale": np.full((3, 2), 0.1, np.float32)}):
        given = call(made, **options)
        compare(way(**{name: tensor(x) for name, x in given.items()}), given)


@pytest.mark.parametrize("shared", [16, [16], torch.tensor(16), np.array([16])], ids=str)
def test_every_kind_of_integers(shared: Any) -> None:
    made = shared_cache(np.random.default_rng(2), [2], [1, 7], 8)
    given = call(made)
    lists = {name: given[name].tolist() for name in ("block_table", "kv_lengths")}
    tensors = {name: tensor(given[name]) for name in "qkv"}
    compare(cascade(**tensors, **lists, shared_lengths=shared), given)


def test_new_lengths_need_no_new_program() -> None:
    made = shared_cache(np.random.default_rng(3), [2], [3, 7], 8)
    given = {name: tensor(x) for name, x in call(made).items()}

    def step(lengths: Any) -> Any:
        return cascade(**given | {"kv_lengths": lengths, "shared_lengths": torch.tensor([8])})

    compiled, graphs = graphs_of(step, fullgraph=True)
    for lengths in ([17, 20], [18, 23]):
        compiled(torch.tensor(lengths))
    assert len(graphs) == 1


def test_the_operator_keeps_pytorchs_rules() -> None:
    made = shared_cache(np.random.default_rng(4), [2], [3, 7], 8)
    x = {name: tensor(y) for name, y in call(made).items()}
    rows, places = (x["q"], x["k"], x["v"]), (x["block_table"], x["kv_lengths"])
    rest = (None, torch.ones(4), None, None, True, None, 2.0, "auto")
    inputs = *rows, torch.tensor(16), *places, *rest
    torch.library.opcheck(torch.ops.tileattn.cascade.default, inputs)


MADE = shared_cache(np.random.default_rng(5), [2], [3, 7], 8)
VALID = {name: tensor(x) for name, x in call(MADE).items()}
NEEDED = VALID["q"].clone().requires_grad_()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": 3}, TypeError, "q must be a torch.Tensor; got int"),
        ({"k": VALID["k"].numpy()}, TypeError, "k must be a torch.Tensor; got ndarray"),
        ({"q": NEEDED}, UnsupportedError, "q requires a gradient, which cascade does not compute"),
        ({"v": elsewhere("cuda:0", VALID["v"])}, ValueError, "v must be on the device of q, cpu"),
        ({"k": VALID["k"].double()}, TypeError, "k must have the dtype of q"),
        ({"shared_lengths": None}, TypeError, "shared_lengths must be integers; got None"),
        ({"shared_lengths": "a"}, TypeError, "shared_lengths must be integers; got 'a'"),
        ({"shared_lengths": [8, 8, 8]}, ValueError, "shared_lengths must be an integer, or integ"),
        ({"shared_lengths": 7}, ValueError, "shared_lengths must be multiples of the page size"),
        (
            {"shared_lengths": elsewhere("cuda:0", torch.tensor([16]))},
            *(ValueError, "shared_lengths must be on the CPU; got a tensor on cuda:0"),
        ),
        ({"kv_lengths": [3.0, 2]}, TypeError, "kv_lengths must be an integer, or integers"),
        ({"block_table": None}, TypeError, "block_table must be integers; got None"),
        ({"causal": 1}, TypeError, "causal must be True or False; got 1"),
        ({"scale": "a"}, TypeError, "scale must be "),
        ({"backend": 3}, TypeError, "backend must be a name or 'auto'; got 3"),
        ({"sinks": np.ones(4)}, TypeError, "sinks must be a torch.Tensor; got ndarray"),
    ],
)
def test_what_is_not_accepted_is_named(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    cascade(**VALID)
    with pytest.raises(error, match=f"^{message}"):
        cascade(**VALID | changed)
