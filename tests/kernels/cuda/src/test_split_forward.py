"""float32 as two float16 numbers in the generic forward kernel, on the CPU."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.cuda.plan.planning import A100, asked, forward
from tests.kernels.cuda.src.lanes_on_host import run
from tileattn import reference
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families import float32_generic
from tileattn.kernels.cuda.families.context import FAILED
from tileattn.kernels.cuda.plan.layout import CallLayout, contiguous, contiguous_inputs
from tileattn.kernels.cuda.tile_sizes import TileSize
from tileattn.testing import assert_attention_close, error_bound

Array = NDArray[Any]

B, HQ, HKV = 2, 2, 1
ON_ANY_LENGTH = replace(A100, tuning=replace(A100.tuning, generic_plane_rows=1))
ONE_ROW_TILE, TWO_ROW_TILES = TileSize(128, 64, 8, 1, 2), TileSize(128, 32, 4, 1, 2, 2)


def problem_of(D: int, Dv: int, Nq: int, Nk: int, *options: str, **changed: Any) -> Problem:
    window = (None, 0) if "causal" in options else (None, None)
    sizes = {"B": B, "Hq": HQ, "Hkv": HKV, "Nq": Nq, "Nk": Nk, "D": D, "Dv": Dv}
    return asked("float32", options, **{**sizes, "window": window, "scale": D**-0.5, **changed})


def drawn(P: Problem) -> dict[str, Array]:
    rng = np.random.default_rng(P.D)
    shapes = (P.B, P.Hq, P.Nq, P.D), (P.B, P.Hkv, P.Nk, P.D), (P.B, P.Hkv, P.Nk, P.Dv)
    return {n: rng.standard_normal(x).astype("float32") for n, x in zip("qkv", shapes, strict=True)}


def attend(
    folder: Path, P: Problem, arrays: dict[str, Array], layout: CallLayout | None = None
) -> tuple[Array, Array, Array, dict[str, Array]]:
    """Run the kernels that split keys and attend; return out, lse, flags of heads, and parts."""
    plan = forward(P, ON_ANY_LENGTH, layout)
    assert [launch.key.split_floats for launch in plan.launches] == [False, True, False]
    out = np.full((P.B, P.Hq, P.Nq, P.Dv), 7, "float32")
    lse = np.full((P.B, P.Hq, P.Nq), 7, "float32")
    parts = run(folder, plan, [*plan.launches[:2]], arrays | {"out": out, "lse": lse})
    flags = parts["head_flags"].view(np.uint32)[2 : 2 + P.entries * P.Hq]
    return out, lse, flags.reshape(P.entries, P.Hq), parts


def use(tile: TileSize, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_generic, "tuned_tiles", lambda *_: (tile,))


# Warps have one tile of 16 rows, or two. For two, registers have no room if heads are wide.
@pytest.mark.parametrize(
    ("sizes", "options", "tile"),
    [
        ((64, 64, 70, 150), (), ONE_ROW_TILE),
        ((64, 64, 70, 150), (), TWO_ROW_TILES),
        ((128, 128, 70, 80), (), ONE_ROW_TILE),
        pytest.param((72, 40, 150, 130), ("causal",), ONE_ROW_TILE, marks=pytest.mark.slow),
        pytest.param((17, 101, 40, 130), (), ONE_ROW_TILE, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_results(
    sizes: tuple[int, int, int, int],
    options: tuple[str, ...],
    tile: TileSize,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(tile, monkeypatch)
    P = problem_of(*sizes, *options)
    given = drawn(P)
    out, lse, flags, _ = attend(tmp_path, P, given)
    causal: dict[str, Any] = {"causal": "causal" in options}
    expected = reference.forward(*given.values(), **causal)
    assert_attention_close((out, lse), expected, error_bound(*given.values(), **causal))
    assert not flags.any()


@pytest.mark.parametrize("tile", [ONE_ROW_TILE, TWO_ROW_TILES], ids=str)
def test_sums_over_many_keys(
    tile: TileSize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor cores cut sums toward zero; over all keys that would show."""
    use(tile, monkeypatch)
    P = problem_of(64, 64, 70, 1024, B=1, Hq=1)
    given = drawn(P)
    out, *_ = attend(tmp_path, P, given)
    q, k, v = given.values()
    s = q @ k.swapaxes(-1, -2) / np.float32(8)
    p = np.exp(s - s.max(-1, keepdims=True))
    exact = reference.forward(*(x.astype(float) for x in (q, k, v))).out
    plain, split = (np.linalg.norm(x - exact) for x in (p @ v / p.sum(-1, keepdims=True), out))
    assert split < plain


@pytest.mark.parametrize(
    "keys", [1024, 1024 + 20, pytest.param(3 * 1024 - 40, marks=pytest.mark.slow)]
)
def test_sums_over_groups_of_64_tiles(
    keys: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are added where the results will be; the last group may have few keys."""
    use(TileSize(128, 16, 8, 1, 2), monkeypatch)
    P = problem_of(32, 20, 130, keys, "causal", B=1, Hq=1)
    given = drawn(P)
    given["k"] *= np.linspace(0.1, 3, keys, dtype="float32")[:, np.newaxis]  # maxima rise
    out, lse, flags, _ = attend(tmp_path, P, given)
    expected = reference.forward(*given.values(), causal=True)
    assert_attention_close((out, lse), expected, error_bound(*given.values(), causal=True))
    assert not flags.any()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_heads_that_fail(name: str, tmp_path: Path) -> None:
    """Those with NaN, and those that read the same keys; the others keep their bits."""
    P = problem_of(32, 32, 70, 90)
    given = drawn(P)
    folders = [tmp_path / x for x in "ab"]
    for folder in folders:
        folder.mkdir()
    before, *_ = attend(folders[0], P, given)
    given[name][1, 0, 5, 3] = np.nan
    after, _, flags, _ = attend(folders[1], P, given)
    assert flags.tolist() == [[0, 0], [FAILED, 0 if name == "q" else FAILED]]
    assert (after[flags == 0] == before[flags == 0]).all()


def test_a_cache_of_larger_capacity(tmp_path: Path) -> None:
    """Keys past the lengths are neither split nor read, but for the rest of the last tile."""
    lengths = np.array([130, 20], "int64")
    P = problem_of(64, 48, 70, 400, "kv_lengths")
    layout = contiguous_inputs(P).with_arrays(kv_lengths=contiguous(lengths.shape, "int64"))
    given = drawn(P)
    expected = reference.forward(*given.values(), kv_lengths=lengths)
    bounds = error_bound(*given.values(), kv_lengths=lengths)
    for b, length in enumerate(lengths):
        given["k"][b, :, length:] = given["v"][b, :, length:] = np.nan
    out, lse, flags, parts = attend(tmp_path, P, given | {"kv_lengths": lengths}, layout)
    assert_attention_close((out, lse), expected, bounds)
    assert not flags.any()
    rows = parts["k_planes"].view(np.float16)[: B * 400 * 128].reshape(B, 400, 128)
    for b, end in enumerate((192, 64)):
        assert np.isfinite(rows[b, :end]).all()
        assert np.isnan(rows[b, end:]).all()


def test_packed_sequences(tmp_path: Path) -> None:
    ends = np.array([0, 70, 70, 203, 260])
    P = problem_of(64, 64, 260, 260, "cu_seqlens_q", "causal", B=1, sequences=4)
    offsets = contiguous(ends.shape, "int64")
    layout = contiguous_inputs(P).with_arrays(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    layout = layout._replace(kv_lengths=None, q_offset=None)
    given = drawn(P)
    arrays = given | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    out, lse, flags, _ = attend(tmp_path, P, arrays, layout)
    assert not flags.any()
    for first, end in pairwise(ends):
        if end > first:
            own = [x[:, :, first:end] for x in given.values()]
            found = out[:, :, first:end], lse[:, :, first:end]
            expected = reference.forward(*own, causal=True)
            assert_attention_close(found, expected, error_bound(*own, causal=True))
