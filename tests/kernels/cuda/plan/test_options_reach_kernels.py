"""Whatever a call uses reaches the kernels: every option with every family, for each architecture.

A kernel that computes scores must have each option of the call in its key, or in its parameters; a
call that no kernel honours must be refused by the name of an option. The table has a row for each
name in `Options`: a new option without a row fails.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.kernels.cuda.plan.planning import A100, H200
from tileattn import BlockMask
from tileattn.backends.cupy import describe
from tileattn.backends.cupy.describe import inputs_of, layout_of
from tileattn.call.options import Options
from tileattn.call.parse import parse
from tileattn.call.problem import Operands, Problem
from tileattn.dtypes import INT8, NAMED
from tileattn.errors import UnsupportedError
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.latent import LATENT
from tileattn.kernels.cuda.families.wide import WIDE
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import CallLayout
from tileattn.kernels.cuda.plan.plan import LaunchPlan, plan_backward, plan_forward

# Kernels that compute no scores: what a score depends on is nothing to them.
SCORELESS = {
    *("add_halves", "add_rows", "append_kv", "cascade_tables", "join_rows", "merge_rows", "rope"),
    *("backward_daux_sum", "backward_dbias_sum"),
    *("backward_dq_convert", "backward_dq_convert_sm90"),
    *("backward_dsinks", "backward_preprocess", "forward_combine", "forward_fold"),
    *("split_keys", "split_queries"),
    *("classify_tiles", "list_key_tiles", "list_query_tiles", "rank_key_tiles"),
    *("count_key_blocks", "count_query_blocks", "order_key_blocks", "order_query_blocks"),
}
# Kernels that compute the logsumexp again, which dropout does not change.
WITHOUT_DROPOUT = {"backward_large_scores", "naive_large_scores"}
# Kernels that sum over the keys of a row in one order.
WITHOUT_SPLITS = {"forward", "naive_forward"}
_DROPOUT = {"dropout_p", "origin"}
_FIRST = {"cu_seqlens_q", "cu_seqlens_k"}  # which say how many sequences others are given for
PAGE = 64


class OnDevice(np.ndarray[Any, Any]):
    """An array that plans take for one of a device."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def on_device(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.zeros(shape, dtype).view(OnDevice)


class Sizes(NamedTuple):
    B: int
    Hq: int
    Hkv: int
    Nq: int
    Nk: int
    D: int
    Dv: int


# Each for other families and tiles.
SIZES = {
    "few queries, many keys": Sizes(2, 4, 2, 3, 9000, 64, 64),
    "many rows that share keys": Sizes(2, 64, 1, 2, 9000, 128, 128),
    "narrow heads": Sizes(2, 4, 2, 300, 5000, 64, 64),
    "heads of 128": Sizes(1, 2, 2, 2100, 2100, 128, 128),
    "keys wider than values": Sizes(1, 2, 1, 200, 200, 192, 128),
    "wide heads": Sizes(2, 4, 2, 200, 300, 256, 256),
    "heads of 512": Sizes(2, 4, 2, 200, 300, 512, 512),
    "odd columns": Sizes(2, 4, 2, 37, 53, 20, 28),
    "latent attention": Sizes(2, 16, 1, 5, 3000, 576, 512),
    "latent attention, many queries": Sizes(1, 16, 1, 200, 300, 576, 512),
}


Honoured = Callable[[LaunchPlan, KernelKey, CallLayout], bool]


def by_key(*names: str) -> Honoured:
    return lambda _, key, __: all(getattr(key, name) for name in names)


def by_field(name: str, value: Any) -> Honoured:
    return lambda plan, *_: bool(plan.fields[name] == value)


def blocks(n: Sizes) -> BlockMask:
    visible = np.zeros((-(-n.Nq // 128), -(-n.Nk // 128)), bool)
    visible[:, 0] = True
    return BlockMask(visible, (128, 128))


def ends(count: int) -> Any:
    return np.array([0, count // 3, count])


def entries(n: Sizes, used: Mapping[str, Any]) -> int:
    return 2 if "cu_seqlens_q" in used else n.B


class Row(NamedTuple):
    """How an option is given, and how a kernel that computes scores shows that it has it."""

    give: Callable[[Sizes, Mapping[str, Any]], dict[str, Any]]
    honoured: Honoured


def heads(n: Sizes, _: Any = None) -> Any:
    return on_device((n.Hq,), "float32")


def length(n: Sizes) -> int:
    return n.Nk // 3 - 1


def packed(n: Sizes, _: Any) -> dict[str, Any]:
    return {"cu_seqlens_q": ends(n.Nq), "cu_seqlens_k": ends(n.Nk)}


def paged(n: Sizes, used: Mapping[str, Any]) -> dict[str, Any]:
    table = on_device((entries(n, used), -(-n.Nk // PAGE)), "int32")
    return {"block_table": table, "kv_lengths": np.full(entries(n, used), length(n))}


DESCALES = ("k_descale", "v_descale")


def by_row(name: str) -> Honoured:
    """Descales of tokens; `calls` gives them, once it knows the shape of the keys."""

    def honoured(plan: LaunchPlan, key: KernelKey, layout: CallLayout) -> bool:
        given = layout.get(name) is not None and key.kv_dtype == "int8"
        return given and bool(plan.fields[f"{name}_rows"] == 1)

    return honoured


def rows(n: Sizes) -> dict[str, Row]:
    """One row for each option of a call of some sizes."""
    return {
        "scale": Row(lambda *_: {"scale": 0.25}, by_field("scale", 0.25)),
        "softcap": Row(lambda *_: {"softcap": 9.0}, by_key("softcap")),
        "alibi_slopes": Row(lambda *_: {"alibi_slopes": heads(n)}, by_key("alibi")),
        "bias": Row(lambda *_: {"bias": on_device((n.Hq, 1, n.Nk), "float32")}, by_key("bias")),
        "causal": Row(lambda *_: {"causal": True}, by_field("right", 0)),
        "window": Row(lambda *_: {"window": (7, None)}, by_field("left", 7)),
        "mask": Row(lambda *_: {"mask": on_device((n.Nq, n.Nk), "bool")}, by_key("mask")),
        "block_mask": Row(lambda *_: {"block_mask": blocks(n)}, by_key("block_mask")),
        "kv_lengths": Row(
            lambda _, used: {"kv_lengths": np.full(entries(n, used), length(n))},
            by_field("length", length(n)),
        ),
        "q_offset": Row(lambda *_: {"q_offset": 3}, by_field("offset", 3)),
        "cu_seqlens_q": Row(packed, by_key("packed")),
        "cu_seqlens_k": Row(packed, by_key("packed")),
        "block_table": Row(paged, by_key("paged")),
        **{name: Row(lambda *_: dict.fromkeys(DESCALES), by_row(name)) for name in DESCALES},
        "tree_mask": Row(
            lambda *_: {"tree_mask": on_device((1, n.Nq, n.Nq), "bool")},
            by_key("mask_mod", "functions"),
        ),
        "prefix": Row(
            lambda *_: {"prefix": length(n), "causal": True}, by_key("mask_mod", "functions")
        ),
        "origin": Row(
            lambda _, used: {
                "origin": np.ones((entries(n, used), 4), np.int64),
                "dropout_p": 0.25,
            },
            by_key("origin"),
        ),
        "sinks": Row(
            lambda *_: {"sinks": heads(n)}, lambda *made: made[2].get("sinks") is not None
        ),
        "dropout_p": Row(lambda *_: {"dropout_p": 0.25}, by_key("dropout")),
        "seed": Row(lambda *_: {"seed": 5, "dropout_p": 0.25}, by_field("seed", 5)),
        "score_mod": Row(
            lambda *_: {"score_mod": lambda s, *_: s * 2}, by_key("score_mod", "functions")
        ),
        "mask_mod": Row(
            lambda *_: {"mask_mod": lambda _b, _h, i, j, *_: i - j < 9},
            by_key("mask_mod", "functions"),
        ),
        "aux": Row(
            lambda *_: {"score_mod": lambda s, _b, h, _i, _j, x: s + x[h], "aux": (heads(n),)},
            by_key("score_mod", "functions"),
        ),
        "invariant": Row(
            lambda *_: {"invariant": True},
            lambda plan, key, _: (
                key.invariant
                or key.kernel in WITHOUT_SPLITS
                or plan.kind.direction == "backward"  # which promises nothing
            ),
        ),
    }


def calls(names: tuple[str, ...], n: Sizes, dtype: str) -> tuple[Problem, Operands]:
    """Make a call of some options, whose keys and values are one array in latent attention."""
    options: dict[str, Any] = {}
    for name in sorted(names, key=_FIRST.__contains__, reverse=True):
        options |= rows(n)[name].give(n, options)
    kind = NAMED[dtype]
    q = on_device((n.B, n.Hq, n.Nq, n.D), kind)
    shape = (40, n.Hkv, PAGE) if "block_table" in options else (n.B, n.Hkv, n.Nk)
    if "cu_seqlens_q" in options:
        q, shape = q[:1], shape if "block_table" in options else (1, *shape[1:])
        if "block_table" in options:
            options.pop("cu_seqlens_k")
    if "k_descale" in options:
        kind = INT8
        options |= {name: on_device(shape, "float32") for name in DESCALES}
    k = on_device((*shape, n.D), kind)
    v = k[..., : n.Dv] if n.D > n.Dv > 256 else on_device((*shape, n.Dv), kind)
    return parse(q, k, v, options)


def plans(problem: Problem, operands: Operands, device: Device) -> Iterator[tuple[Any, CallLayout]]:
    layout = layout_of(inputs_of(operands), operands)
    yield plan_forward(problem, layout.with_contiguous_results(problem, "forward"), device), layout
    if problem.page is None and not problem.is_quantised:
        both = layout.with_contiguous_results(problem, "backward")
        yield plan_backward(problem, both, device), layout


def pairs() -> list[tuple[str, ...]]:
    """Give each option alone, then pairs drawn at random: each option comes several times."""
    rng = np.random.default_rng(0)
    names = list(Options.__annotations__)
    drawn = [tuple(rng.choice(names, 2, replace=False)) for _ in range(3 * len(names))]
    return [*((name,) for name in names), *drawn]


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "on_device", lambda x: x.view(OnDevice))


def test_each_option_has_a_row() -> None:
    assert rows(SIZES["narrow heads"]).keys() == Options.__annotations__.keys()


@pytest.mark.parametrize("device", [A100, H200], ids=lambda device: device.arch)
@pytest.mark.parametrize("sizes", SIZES)
def test_each_option_is_honoured_or_refused_by_name(sizes: str, device: Device) -> None:
    n, table = SIZES[sizes], rows(SIZES[sizes])
    planned = set()
    for number, names in enumerate(pairs()):
        dtype = ("bfloat16", "float16", "bfloat16", "float32")[number % 4]
        refusal = ""
        made: list[tuple[LaunchPlan, CallLayout]] = []
        try:
            made += plans(*calls(names, n, dtype), device)
        except UnsupportedError as error:
            refusal = str(error)
        assert made or any(name in refusal for name in names), (names, refusal)
        for (plan, layout), name in product(made, names):
            for launch in plan.launches:
                key = launch.key
                without = name in _DROPOUT and key.kernel in WITHOUT_DROPOUT
                if key.kernel in SCORELESS or without:
                    continue
                planned.add(key.kernel)
                assert table[name].honoured(plan, key, layout), (names, dtype, str(plan))
    assert len(planned) > 3


# Kernels of each family, forward and backward; a family with one pass leaves the other to these.
FAMILIES = {
    "generic": {"forward", "backward_dkdv", "backward_dq"},
    "naive": {"naive_forward", "naive_dkdv", "naive_dq"},
    "float32": {*("split_keys", "split_queries"), "forward_float32_sm90"},
    "hopper": {"forward_sm90", "backward_sm90", "backward_halves_sm90", "backward_wide_sm90"},
    "split": {"forward_split"},
    "decode": {"forward_decode_sm90 split"},
    "split_sm90": {"forward_sm90 split"},
    "latent": {LATENT},
    "wide": {WIDE},
    "pages": {"forward_sm90 over pages"},
}


def kernel_name(key: KernelKey) -> str:
    return key.kernel + " split" * key.split_kv + " over pages" * key.paged


def test_every_family_is_among_the_sizes() -> None:
    planned = set()
    for n, device, dtype in product(SIZES.values(), [A100, H200], ["bfloat16", "float32"]):
        made = [*plans(*calls((), n, dtype), device)]
        if n.D <= 256:
            made += plans(*calls(("block_table",), n, dtype), device)
        planned |= {kernel_name(launch.key) for plan, _ in made for launch in plan.launches}
    missing = {family: kernels - planned for family, kernels in FAMILIES.items()}
    assert missing == {family: set() for family in FAMILIES}


def test_latent_attention_evaluates_a_tree_or_leaves_it_to_others() -> None:
    problem, operands = calls(("tree_mask",), SIZES["latent attention"], "bfloat16")
    (plan, _), *_ = plans(problem, operands, H200)
    assert any("tree_mask is in use" in launch.why for launch in plan.launches)
    problem, operands = calls((), SIZES["latent attention"], "bfloat16")
    (plan, _), *_ = plans(problem, operands, H200)
    assert plan.launches[0].key.kernel == LATENT


@pytest.mark.parametrize("sizes", ["narrow heads", "heads of 128"])
def test_a_tree_has_the_tiles_of_the_same_mask_as_a_function(sizes: str) -> None:
    n = SIZES[sizes]

    def tiles(**options: Any) -> list[Any]:
        shapes = (n.B, n.Hq, n.Nq, n.D), (n.B, n.Hkv, n.Nk, n.D)
        q, k = (on_device(shape, NAMED["bfloat16"]) for shape in shapes)
        problem, operands = parse(q, k, on_device(k.shape, k.dtype), options)
        return [
            (x.key.kernel, x.key.tile, x.key.groups)
            for plan, _ in plans(problem, operands, H200)
            for x in plan.launches
        ]

    tree = on_device((1, n.Nq, n.Nq), "bool")
    seen = on_device((n.Nq, n.Nk), "bool")
    as_tree = tiles(tree_mask=tree)
    assert as_tree == tiles(mask_mod=lambda _b, _h, i, j, x: x[i, j], aux=(seen,))
    assert as_tree != tiles()
