"""Arguments that are wrong on one rank: all ranks raise, and its own message names the argument."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tileattn.distributed as dist
from tests.distributed.threads import Rank, on_ranks
from tileattn.call.options import Options
from tileattn.distributed import Layout
from tileattn.errors import UnsupportedError

REFUSALS = TypeError, ValueError, UnsupportedError
X = np.random.default_rng(0).standard_normal((3, 1, 2, 6, 8))
JUNK: dict[str, Any] = {
    "object": object(),
    "text": "nonsense",
    "complex": 2j,
    "NaN": float("nan"),
    "-1.5": -1.5,
    "dict": {"a": 1},
    "set": {3},
    "list of text": ["a", "b"],
    "array of objects": np.array([None, "a"]),
    "5 axes": np.zeros((1, 1, 1, 1, 2)),
    "dates": np.zeros(3, "M8[s]"),
    "function": lambda: None,
    "class": int,
}
GIVEN = {"q": X[0], "k": X[1], "v": X[2]}
CALLS: dict[str, Callable[..., Any]] = {
    "forward": dist.forward,
    "backward": dist.backward,
    "vjp": dist.vjp,
    "explain": dist.explain,
}
OWN = set(inspect.signature(dist.backward).parameters) - {"comm", "options"}
ARGUMENTS = {
    "forward": set(inspect.signature(dist.forward).parameters) - {"comm", "options"},
    "backward": OWN,
    "vjp": {"q", "k", "v", "layout", "layout_k", "schedule", "backend", "timeout"},
    "explain": set(inspect.signature(dist.explain).parameters) - {"comm", "options"},
}
CASES = [
    (call, name, junk)
    for call, names in ARGUMENTS.items()
    for name in sorted(names | (set(Options.__annotations__) if call == "forward" else set()))
    for junk in JUNK
    if (name, junk) != ("scale", "-1.5")  # a valid one
    if (name, junk) not in {("score_mod", "class"), ("mask_mod", "class")}  # whatever it says
]


def arguments(call: str) -> dict[str, Any]:
    if call != "backward":
        return dict(GIVEN)
    return GIVEN | {"dout": X[0], "out": X[0], "lse": np.zeros((1, 2, 6))}


@pytest.mark.parametrize(("call", "name", "junk"), CASES)
def test_one_rank_is_wrong(call: str, name: str, junk: str) -> None:
    sent: list[list[int]] = []

    def run(comm: Rank) -> Any:
        sent.append(comm.world.messages_sent)
        given = arguments(call)
        if comm.rank == 1:
            given[name] = JUNK[junk]
        return CALLS[call](comm=comm, **given)

    first, second = on_ranks(2, run)
    assert sent[0] == [0, 0]
    assert isinstance(second, REFUSALS), second
    assert name in str(second)
    assert isinstance(first, RuntimeError), first
    assert str(first) == f"rank 1 has failed: {type(second).__name__}: {second}"


@pytest.mark.parametrize("junk", JUNK)
def test_what_is_no_communicator(junk: str) -> None:
    for name, call in CALLS.items():
        with pytest.raises(TypeError, match="comm must be"):
            call(comm=JUNK[junk], **arguments(name))


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("name", ["q", "k", "v", "ranks", "dtype", "layout", "layout_k", "rates"])
def test_predictions(name: str, junk: str) -> None:
    given: dict[str, Any] = dict.fromkeys("qkv", (1, 2, 6, 8))
    with pytest.raises(REFUSALS, match=name):
        dist.predict(**given | {"ranks": 2} | {name: JUNK[junk]})


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("parts", Layout),
        ("lengths", Layout.contiguous),
        ("length", lambda x: Layout.zigzag(x, 2)),
        ("ranks", lambda x: Layout.zigzag(8, x)),
        ("length", lambda x: Layout.striped(x, 2, 2)),
        ("ranks", lambda x: Layout.striped(8, x, 2)),
        ("width", lambda x: Layout.striped(8, 2, x)),
    ],
)
def test_layouts(name: str, make: Callable[[Any], Any], junk: str) -> None:
    with pytest.raises(REFUSALS, match=name):
        make(JUNK[junk])
