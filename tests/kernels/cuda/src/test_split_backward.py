"""float32 as two float16 numbers in the generic backward kernels, on the CPU."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.cuda.plan.planning import backward
from tests.kernels.cuda.src.lanes_on_host import run
from tests.kernels.cuda.src.test_split_forward import ON_ANY_LENGTH, drawn, problem_of
from tileattn import Gradients, reference
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import float32_generic
from tileattn.kernels.cuda.families.float32 import SPLIT_KEYS, SPLIT_QUERIES
from tileattn.kernels.cuda.families.float32_generic import SPLIT_BACKWARD, SPLIT_DQ
from tileattn.kernels.cuda.plan.layout import CallLayout, contiguous, contiguous_inputs
from tileattn.kernels.cuda.tile_sizes import TileSize
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]

KERNELS = ["backward_preprocess", SPLIT_KEYS, SPLIT_QUERIES, SPLIT_BACKWARD, SPLIT_DQ]


def gradients_of(found: Iterable[Array]) -> Gradients:
    dq, dk, dv = found
    return Gradients(dq, dk, dv, None, None)


def gradients(
    folder: Path,
    P: Problem,
    given: dict[str, Array],
    layout: CallLayout | None = None,
    **constants: int,
) -> tuple[Gradients, Array]:
    """Run the kernels that compute gradients; return these, and the flags of heads."""
    plan = backward(P, ON_ANY_LENGTH, layout)
    launches = [x for x in plan.launches if not x.key.head_flags]
    assert [launch.key.kernel for launch in launches] == KERNELS
    results = {f"d{name}": np.full_like(given[name], 7) for name in "qkv"}
    parts = run(folder, plan, launches, given | results, **constants)
    flags = parts["head_flags"].view(np.uint32)[2 : 2 + P.entries * P.Hkv]
    return gradients_of(results.values()), flags.reshape(P.entries, P.Hkv)


def with_forward(given: dict[str, Array], **options: Any) -> dict[str, Array]:
    """Add what the backward pass gets from the forward pass, and dout."""
    out, lse = (x.astype("float32") for x in reference.forward(*given.values(), **options))
    dout = np.random.default_rng(9).standard_normal(out.shape).astype("float32")
    return given | {"out": out, "lse": lse, "dout": dout}


def check(grads: Gradients, given: dict[str, Array], **options: Any) -> None:
    q, k, v, _, _, dout = given.values()
    expected = reference.backward(dout, q, k, v, **options)
    assert_attention_close(grads, expected, error_bound(q, k, v, dout, **options))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((64, 64, 40, 70), ()),
        pytest.param((72, 128, 70, 80), ("causal",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_results(
    sizes: tuple[int, int, int, int], options: tuple[str, ...], tmp_path: Path
) -> None:
    P = problem_of(*sizes, *options)
    causal: dict[str, Any] = {"causal": "causal" in options}
    given = with_forward(drawn(P), **causal)
    grads, flags = gradients(tmp_path, P, given)
    check(grads, given, **causal)
    assert not flags.any()


@pytest.mark.parametrize(
    ("queries", "keys"), [pytest.param(300, 16, marks=pytest.mark.slow), (16, 300)]
)
def test_sums_over_groups_of_tiles(
    queries: int, keys: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are added where the results will be. Here a group has 128 rows, or nearly no end."""
    monkeypatch.setattr(float32_generic, "tuned_tiles", lambda *_: (TileSize(16, 16, 1),))
    monkeypatch.setattr(float32_generic, "has_short_splits", lambda *_: False)
    P = problem_of(20, 35, queries, keys, B=1, Hq=1)
    given, found = with_forward(drawn(P)), []
    for tiles in (2, 64):
        folder = tmp_path / str(tiles)
        folder.mkdir()
        grads, flags = gradients(folder, P, given, GROUP_TILES=tiles)
        check(grads, given)
        assert not flags.any()
        found.append(grads)
    moved = [(x != y).any() for x, y in zip(found[0][:3], found[1][:3], strict=True)]
    assert moved == [keys > queries, queries > keys, queries > keys]


@pytest.mark.parametrize("name", ["k", "dout"])
def test_heads_that_fail(name: str, tmp_path: Path) -> None:
    """Those of a key head with NaN; the others keep their bits."""
    P = problem_of(32, 32, 20, 40, Hq=2, Hkv=2)
    folders = [tmp_path / x for x in "ab"]
    for folder in folders:
        folder.mkdir()
    given = with_forward(drawn(P))
    before, _ = gradients(folders[0], P, given)
    given[name][1, 0, 5, 3] = np.nan
    after, flags = gradients(folders[1], P, given)
    good = flags == 0
    assert good.tolist() == [[True, True], [False, True]]
    for x, y in zip(before[:3], after[:3], strict=True):
        assert (x[good] == y[good]).all()


def test_packed_sequences(tmp_path: Path) -> None:
    ends = np.array([0, 20, 20, 95, 130])
    P = problem_of(32, 32, 130, 130, "cu_seqlens_q", "causal", B=1, sequences=4)
    offsets = contiguous(ends.shape, "int64")
    layout = contiguous_inputs(P).with_arrays(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    layout = layout._replace(kv_lengths=None, q_offset=None)
    given = drawn(P)
    parts = [
        with_forward({n: x[:, :, first:end] for n, x in given.items()}, causal=True)
        for first, end in pairwise(ends)
    ]
    whole = {name: np.concatenate([part[name] for part in parts], axis=2) for name in parts[0]}
    arrays = whole | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    grads, flags = gradients(tmp_path, P, arrays, layout)
    assert not flags.any()
    for (first, end), part in zip(pairwise(ends), parts, strict=True):
        if end > first:
            own = [x[:, :, first:end] for x in grads[:3]]
            check(gradients_of(own), part, causal=True)
