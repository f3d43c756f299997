"""What tests of the Hopper kernels share."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tileattn import BlockMask
from tileattn.backends.cupy import describe
from tileattn.kernels.launch.layout import CallLayout, array_layout
from tileattn.problem import Problem, parse

Array = NDArray[Any]
Masked = Callable[[int, int], BlockMask]

B, HQ, HKV = 2, 6, 2
DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
LENGTHS = [(1, 1), (1, 300), (300, 1), (129, 257), (64, 128), (200, 515), (513, 130)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "offset": {"causal": True, "q_offset": [-40, 7]},
    "window": {"window": (70, 9)},
    "left": {"window": (50, None), "q_offset": 120},
    "right": {"window": (None, 30)},
    "lengths": {"kv_lengths": [0.4, 0.9]},
    "softcap": {"softcap": 2.0},
    "negative scale": {"scale": -0.3, "causal": True},
    "alibi": {"alibi_slopes": (HQ,)},
    "sinks": {"sinks": (HQ,), "causal": True},
    "all": {
        **{"window": (90, 5), "q_offset": [11, -30], "kv_lengths": [1.0, 0.7]},
        **{"softcap": 3.0, "alibi_slopes": (B, HQ), "sinks": (HQ,)},
    },
}


PARTS = 6
"""Tests that the examples of a property are dealt out to, for processes that work side by side."""


def in_turn(dimensions: list[tuple[int, int]]) -> list[tuple[int, int, str, Any]]:
    """List all options at all head dimensions, each with either dtype at every other one."""
    return [
        (*dims, name, DTYPES[(i + j) % 2])
        for i, dims in enumerate(dimensions)
        for j, name in enumerate(OPTIONS)
    ]


def _random(lead: tuple[int, int], block: tuple[int, int], share: float) -> Masked:
    """Make masks of blocks that are seen or not, drawn at random."""

    def made(Nq: int, Nk: int) -> BlockMask:
        sides = (-(-n // size) for n, size in zip((Nq, Nk), block, strict=True))
        return BlockMask(np.random.default_rng(3).random((*lead, *sides)) < share, block)

    return made


def _dense(Nq: int, Nk: int) -> BlockMask:
    """Blocks that no tile divides, most of which are seen in part."""
    seen = np.random.default_rng(4).random((B, 1, Nq, Nk)) < 0.7
    seen[:, :, : Nq // 2, Nk // 2 :] = False
    return BlockMask.from_mask(seen, (100, 72))


def _documents(Nq: int, Nk: int) -> BlockMask:
    """Queries see the keys of their own document, as those of packed sequences do."""
    return BlockMask.from_predicate(
        lambda _b, _h, i, j: i * 4 // Nq == j * 4 // Nk, shape=(1, 1, Nq, Nk), block_size=(64, 64)
    )


MASKS: dict[str, Masked] = {
    "half": _random((B, HQ), (128, 128), 0.5),
    "few": _random((1, HQ), (128, 128), 0.15),
    "small": _random((B, 1), (64, 32), 0.2),
    "dense": _dense,
    "documents": _documents,
    "nothing": _random((1, 1), (128, 128), 0.0),
    "everything": _random((1, 1), (128, 128), 1.0),
}


def arrays(
    dtype: Any, D: int, Dv: int, Nq: int, Nk: int, seed: int = 0
) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    shapes = ((B, HQ, Nq, D), (B, HKV, Nk, D), (B, HKV, Nk, Dv))
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def filled(options: dict[str, Any], Nk: int) -> dict[str, Any]:
    """Fill in what depends on the problem: arrays by their shapes, lengths by their share."""
    rng = np.random.default_rng(1)
    made = dict(options)
    for name in {"alibi_slopes", "sinks"} & made.keys():
        made[name] = rng.random(made[name]).astype(np.float32)
    if "kv_lengths" in made:
        made["kv_lengths"] = [int(share * Nk) for share in made["kv_lengths"]]
    return made


def sent(x: Any) -> Any:
    """Copy arrays to the GPU; leave the rest."""
    import cupy

    return cupy.asarray(x) if isinstance(x, np.ndarray) else x


def described(
    kind: str, q: Any, k: Any, v: Any, *, dout: Any = None, **options: Any
) -> tuple[Problem, CallLayout]:
    """Describe a call on the GPU, for a plan of a pass."""
    problem, operands = parse(q, k, v, options)
    layout = describe.layout_of(describe.inputs_of(problem, operands), operands)
    layout = layout.with_contiguous_results(problem, kind)
    if dout is not None:
        layout = layout.with_arrays(dout=array_layout(dout, dout.data.ptr))
    return problem, layout


def visible(Nq: int, Nk: int, options: dict[str, Any]) -> NDArray[np.bool_]:
    """Write out which query sees which key, by the contract: shape (B, Nq, Nk)."""
    i, j = np.arange(Nq)[:, None], np.arange(Nk)
    lengths = np.broadcast_to(options.get("kv_lengths", Nk), B)
    offsets = np.broadcast_to(options.get("q_offset", lengths - Nq), B)
    left, right = options.get("window", (None, 0 if options.get("causal") else None))
    rows = []
    for offset, length in zip(offsets, lengths, strict=True):
        seen = np.broadcast_to(j < length, (Nq, Nk)).copy()
        if left is not None:
            seen &= j >= i + offset - left
        if right is not None:
            seen &= j <= i + offset + right
        rows.append(seen)
    return np.stack(rows)
