"""Calls of a kind with other numbers ask of the GPU what a first call asks; no GPU."""

import re
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

import tileattn
from tests.backends.cupy.fake_cupy import Machine, asked_by
from tests.backends.cupy.test_workspace import HQ, inputs
from tileattn import api
from tileattn.backends.cupy import backend, cached_passes, executable
from tileattn.backends.cupy.driver_launch import LaunchBlock
from tileattn.call.prepared import CALLS, SEEN_OFTEN
from tileattn.call.straight_line import Paths
from tileattn.kernels.cuda.plan.plan import LaunchPlan, launch_plan

SIZES = 1, 7, 60, 64, 65, 128, 150, 200, 257, 400

Options = Callable[[Random, Machine, dict[str, int]], dict[str, Any]]


def near(b: Any, h: Any, i: Any, j: Any) -> Any:
    return abs(i - j) < 40 + h + b


def biased(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s + h * (i - j) + b


def within(width: int) -> Any:
    return lambda _b, _h, i, j: i - j < width


def scaled(by: float) -> Any:
    return lambda s, _b, _h, _i, _j: s * by


def documents(of_token: Any) -> Any:
    return lambda _b, _h, _i, j: of_token[j] == 0


def lengths(rng: Random, n: dict[str, int]) -> list[int]:
    return [rng.randrange(n["Nk"] + 1) for _ in range(n["B"])]


def offsets(rng: Random, end: int, count: int) -> list[int]:
    return [0, *sorted(rng.choices(range(end + 1), k=count - 1)), end]


def pairs(rng: Random, gpu: Machine, n: dict[str, int], dtype: Any) -> Any:
    """Make a view of an array of pairs, which broadcasts along some axes."""
    shape = [rng.choice((1, n[axis])) for axis in ("B", "Hq", "Nq", "Nk")]
    *lead, columns = shape
    more = rng.choice((0, 1, 8))  # elements between rows
    return gpu.array((*lead, columns + more), dtype)[..., :columns]


KINDS: dict[str, Options] = {
    "plain": lambda _rng, _gpu, _n: {},
    "causal": lambda rng, _gpu, _n: {"causal": True, "scale": rng.random()},
    "window": lambda rng, _gpu, _n: {"window": (rng.randrange(1, 90), rng.randrange(1, 9))},
    "dropout": lambda rng, _gpu, _n: {"dropout_p": rng.uniform(0.1, 0.9), "seed": rng.randrange(9)},
    "lengths": lambda rng, _gpu, n: {"kv_lengths": lengths(rng, n), "softcap": rng.uniform(1, 9)},
    "on the GPU": lambda _rng, gpu, n: {"kv_lengths": gpu.array((n["B"],), np.int32)},
    "sinks": lambda _rng, gpu, n: {"sinks": gpu.array((n["Hq"],)), "causal": True},
    "alibi": lambda _rng, gpu, n: {"alibi_slopes": gpu.array((n["Hq"],))},
    "alibi of sequences": lambda _rng, gpu, n: {"alibi_slopes": gpu.array((n["B"], n["Hq"]))},
    "bias": lambda rng, gpu, n: {"bias": pairs(rng, gpu, n, np.float16)},
    "wide bias": lambda rng, gpu, n: {"bias": pairs(rng, gpu, n, np.float32), "causal": True},
    "mask": lambda rng, gpu, n: {"mask": pairs(rng, gpu, n, np.bool_)},
    "bias and mask": lambda rng, gpu, n: {
        "bias": gpu.array((n["Nk"],), np.float16),
        "mask": pairs(rng, gpu, n, np.bool_),
        "sinks": gpu.array((n["Hq"],)),
    },
    "mask_mod": lambda _rng, _gpu, _n: {"mask_mod": near},
    "captured numbers": lambda rng, _gpu, n: {
        "mask_mod": within(rng.randrange(1, 90)),
        "score_mod": scaled(rng.random()),
        "kv_lengths": lengths(rng, n),
    },
    "captured array": lambda rng, gpu, n: {
        "mask_mod": documents(gpu.array((n["Nk"] + rng.randrange(9),), np.int32)),
    },
    "packed": lambda rng, _gpu, n: {
        "cu_seqlens_q": offsets(rng, n["Nq"], 5),
        "cu_seqlens_k": offsets(rng, n["Nk"], 5),
    },
    "packed alike": lambda rng, _gpu, n: {
        "cu_seqlens_k": offsets(rng, n["Nk"], 1 + rng.randrange(4)),
        "causal": True,
    },
    "score_mod": lambda rng, _gpu, n: {"score_mod": biased, "kv_lengths": lengths(rng, n)},
}


def calls(gpu: Machine, kind: str, deterministic: bool | None) -> list[Callable[[], Any]]:
    """Draw calls of one kind, forward or backward, each of which takes its own memory again."""
    rng = Random(f"{kind} {deterministic}")
    dtype = np.float16 if gpu.arch == "sm_90a" else np.float32
    made = []
    for _ in range(14):
        n = {"B": rng.choice((1, 2, 3)), "Hkv": rng.choice((1, 2)), "D": 64, "Dv": 64}
        n |= {"Nq": rng.choice(SIZES), "Nk": rng.choice(SIZES), "Hq": 2 * n["Hkv"]}
        n |= {"Nq": n["Nk"]} if kind == "packed alike" else {}
        given, options = inputs(gpu, dtype, **n), KINDS[kind](rng, gpu, n)
        if kind.startswith("packed"):
            given = {name: x[0] for name, x in given.items()}
        call: Callable[[], Any]
        if deterministic is None:
            call = partial(tileattn.forward, *map(given.get, "qkv"), **options)
        else:
            call = partial(tileattn.backward, **given, **options, deterministic=deterministic)
        made.append(gpu.reusing(call))
    return made


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[LaunchBlock]:
    """Note the launch blocks that are made, and let each result have its own memory."""
    made: list[LaunchBlock] = []

    class Noted(LaunchBlock):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(executable, "LaunchBlock", Noted)
    monkeypatch.setattr(cached_passes, "ONE_ALLOCATION_MAX_BYTES", 0)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [None, False, True])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_started_as_if_it_were_the_first(
    gpu: Machine, kind: str, arch: str, deterministic: bool | None, blocks: list[LaunchBlock]
) -> None:
    """Whatever ran before in the same launch blocks, once and when it comes back."""
    gpu.arch = arch
    made = calls(gpu, kind, deterministic)
    expected = []
    for call in made:
        CALLS.clear()
        expected.append(asked_by(gpu, call))
    CALLS.clear()
    blocks.clear()
    for call, same in zip(made, expected, strict=True):
        assert asked_by(gpu, call) == same
    assert len(blocks) < len(made)
    for n in Random(kind).sample(range(len(made)), len(made)) * 2:
        assert asked_by(gpu, made[n]) == expected[n]
    assert gpu.uploads == gpu.sent == []


@pytest.mark.parametrize("deterministic", [None, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_call_of_a_kind_is_not_planned(
    h200: Machine, kind: str, deterministic: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []

    def plan(*given: Any, **options: Any) -> LaunchPlan:
        planned.append(launch_plan(*given, **options))
        return planned[-1]

    monkeypatch.setattr(backend, "launch_plan", plan)
    CALLS.clear()
    for N in (208, 200):  # of one size class, with equally aligned rows of a bias
        n = {"B": 1 if kind.startswith("packed") else 2, "Hq": 4, "Hkv": 2, "Nq": N, "Nk": N}
        given, options = inputs(h200, np.float16, **n), KINDS[kind](Random(4), h200, n)
        if deterministic is None:
            tileattn.forward(*map(given.get, "qkv"), **options)
        else:
            tileattn.backward(**given, **options, deterministic=deterministic)
    assert len(planned) == 1


@pytest.mark.parametrize("named", [(), ("sinks",), ("bias",), ("sinks", "bias")])
def test_gradients_that_are_named_need_no_validation(
    h200: Machine, named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of options are computed only if `wrt` names them."""
    names = ("v", *named, "k", "q")
    given = {N: inputs(h200, np.float16, Nq=N) for N in (216, 208, 200)}
    options = {"sinks": h200.array((HQ,)), "bias": h200.array((HQ, 1, 1))}
    tileattn.backward(**given[216], wrt=names, **options)
    monkeypatch.setattr(api, "validated", None)
    for N in (208, 200):
        h200.launches.clear()
        found = tileattn.backward(**given[N], wrt=names, **options)
        assert found.dq.shape == given[N]["q"].shape
        for name in options:
            is_named = name in named
            assert (getattr(found, f"d{name}") is not None) is is_named
            assert any(params[f"d{name}"] for *_, params in h200.launches) is is_named


def test_names_of_all_gradients_ask_for_all(h200: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that repeats is not validated."""
    given = inputs(h200, np.float16)
    for _ in range(SEEN_OFTEN + 1):
        tileattn.backward(**given, wrt=("v", "k", "q"))
    monkeypatch.setattr(api, "validated", None)
    for wrt in (None, ("q", "k", "v")):
        assert tileattn.backward(**given, wrt=wrt).dq.shape == given["q"].shape


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (None, 5), "softcap": 2.0}])
def test_lengths_that_run_the_same_kernels_take_one_path(
    h200: Machine, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each path compiles all paths of its kind again."""
    programs = []
    add = Paths.add

    def noted(self: Paths, function: Any, arguments: Any, end: Any) -> bool:
        programs.append(end[0])
        return add(self, function, arguments, end)

    monkeypatch.setattr(Paths, "add", noted)
    for N in (320, 310, 333, 400, 401, 600, 640, 555):  # some fill their last tile
        given = inputs(h200, np.float16, B=1, Nq=N, Nk=N, D=64, Dv=64)
        tileattn.forward(*map(given.get, "qkv"), **options)
        tileattn.backward(**given, **options)
    assert len(programs) == len({*programs}) > 1


def test_a_pass_without_all_results_starts_no_other_call(h200: Machine) -> None:
    """The gradients of a new size are complete after a call of the kind that asked for none."""
    for Nq in (200, 150, 128):
        given = inputs(h200, np.float16, Nq=Nq)
        wrt: Any = () if Nq == 200 else None
        found = tileattn.backward(**given, wrt=wrt)
        assert [x is None for x in found[:3]] == [wrt is not None] * 3


@pytest.mark.parametrize(
    ("offsets_q", "message"),
    [
        ([0, 30, 20, 40], "must not decrease; got 20 after 30"),
        ([1, 20, 30, 40], "must start with 0; got 1"),
        ([0, 20, 30, 41], "must end at the number of tokens of q, 40; got 41"),
        ([0, 20, 40], "cu_seqlens_k must have as many entries as cu_seqlens_q, 3; got 4"),
    ],
)
def test_wrong_offsets_of_a_known_kind_are_refused(
    h200: Machine, offsets_q: list[int], message: str
) -> None:
    given = inputs(h200, np.float16, B=1, Nq=40, Nk=60)
    q, k, v = (given[name][0] for name in "qkv")
    ends = [0, 10, 20, 60]
    for n in (7, 8):
        tileattn.forward(q, k, v, cu_seqlens_q=[0, n, 30, 40], cu_seqlens_k=ends)
    with pytest.raises(ValueError, match=re.escape(message)):
        tileattn.forward(q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=ends)
