"""Helpers of the tests of the Hopper kernels."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import tileattn
from tests.arrays import Array, Given, normal
from tests.on_gpu import host, poisoned, sent
from tileattn import Attention, BlockMask, Gradients, reference
from tileattn.backends.cupy import describe
from tileattn.call.parse import parse
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.hopper import HOPPER, HOPPER_BACKWARDS
from tileattn.kernels.cuda.families.tiles import MAX_HEAD_DIM, SMALL_TILE
from tileattn.kernels.cuda.plan.layout import CallLayout, array_layout
from tileattn.kernels.cuda.plan.plan import plan_backward, plan_forward
from tileattn.testing import assert_attention_close, error_bound

Masked = Callable[[int, int], BlockMask]

B, HQ, HKV = 2, 6, 2
DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
LENGTHS = [(1, 1), (1, 300), (300, 1), (129, 257), (64, 128), (200, 515), (513, 130)]
SQUARE = [(64, 64), (128, 128)]
PAIRED = [(512, 512), (384, 320), (264, 512)]
WIDE = [(256, 256), (192, 192), (192, 128), (128, 192), (256, 64)]
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


def _random(lead: tuple[int, int], block: tuple[int, int], density: float) -> Masked:
    """Make masks of full and empty blocks, drawn at random."""

    def made(Nq: int, Nk: int) -> BlockMask:
        sides = (-(-n // size) for n, size in zip((Nq, Nk), block, strict=True))
        return BlockMask(np.random.default_rng(3).random((*lead, *sides)) < density, block)

    return made


def _dense(Nq: int, Nk: int) -> BlockMask:
    """Blocks that no tile divides, most of them partial."""
    visible = np.random.default_rng(4).random((B, 1, Nq, Nk)) < 0.7
    visible[:, :, : Nq // 2, Nk // 2 :] = False
    return BlockMask.from_mask(visible, (100, 72))


def _documents(Nq: int, Nk: int) -> BlockMask:
    """Queries attend to keys of their own document, as in packed sequences."""
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


def arrays(dtype: Any, D: int, Dv: int, Nq: int, Nk: int, seed: int = 0) -> Given:
    return normal((B, HQ, HKV, Nq, Nk, D, Dv), dtype, seed)


def filled(options: dict[str, Any], Nk: int) -> dict[str, Any]:
    """Fill in what depends on the problem: arrays by their shapes, lengths by their fraction."""
    rng = np.random.default_rng(1)
    made = dict(options)
    for name in sorted({"alibi_slopes", "sinks"} & made.keys()):
        made[name] = rng.random(made[name]).astype(np.float32)
    if "kv_lengths" in made:
        made["kv_lengths"] = [int(part * Nk) for part in made["kv_lengths"]]
    return made


def described(
    kind: str, q: Any, k: Any, v: Any, *, dout: Any = None, **options: Any
) -> tuple[Problem, CallLayout]:
    """Describe a call on the GPU, for a plan of a pass."""
    problem, operands = parse(q, k, v, options)
    layout = describe.layout_of(describe.inputs_of(operands), operands)
    layout = layout.with_contiguous_results(problem, kind)
    if dout is not None:
        layout = layout.with_arrays(dout=array_layout(dout, dout.data.ptr))
    return problem, layout


def runs_forward(q: Any, k: Any, v: Any, **options: Any) -> bool:
    """True if the Hopper kernel runs a forward pass whose arrays are on the GPU."""
    plan = plan_forward(*described("forward", q, k, v, **options), describe.device_of(0))
    return any(launch.key.kernel == HOPPER for launch in plan.launches)


def runs_backward(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> bool:
    """True if a Hopper kernel runs a backward pass whose arrays are on the GPU."""
    call = described("backward", q, k, v, dout=dout, **options)
    launches = plan_backward(*call, describe.device_of(0)).launches
    return any(launch.key.kernel in HOPPER_BACKWARDS for launch in launches)


def is_small(q: Any, k: Any, v: Any) -> bool:
    """True if a small tile of the generic backward kernel has all queries and keys."""
    longest: int = max(q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
    return longest <= SMALL_TILE


def forward(q: Array, k: Array, v: Array, **options: Any) -> Attention:
    """Call the forward pass on copies on the GPU; the Hopper kernel must run it."""
    given, there = (sent(q), sent(k), sent(v)), {name: sent(x) for name, x in options.items()}
    assert runs_forward(*given, **there)
    with poisoned():
        attention: Attention = host(tileattn.forward(*given, **there))
    return attention


def both(
    given: Given,
    *,
    own: bool = True,
    dlse: Array | None = None,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Attention, Gradients]:
    """Call both passes on copies on the GPU; ``own`` says whether Hopper kernels must run them."""
    q, k, v, dout = map(sent, given)
    there = {name: sent(x) for name, x in options.items()}
    if max(q.shape[-1], v.shape[-1]) <= MAX_HEAD_DIM:
        assert runs_forward(q, k, v, **there) is own
    assert runs_backward(q, k, v, dout, **there) is (own and not is_small(q, k, v))
    more = {"dlse": sent(dlse), "deterministic": deterministic}
    with poisoned():
        out, lse = tileattn.forward(q, k, v, **there)
        grads = tileattn.backward(dout, q, k, v, out, lse, **more, **there)
    return host(Attention(out, lse)), host(grads)


def check_forward(q: Array, k: Array, v: Array, **options: Any) -> Attention:
    """Compare the forward pass with the oracle."""
    attention = forward(q, k, v, **options)
    expected = reference.forward(q, k, v, **options)
    assert_attention_close(attention, expected, error_bound(q, k, v, **options))
    return attention


def check(given: Given, *, dlse: Array | None = None, **options: Any) -> Gradients:
    """Compare both passes with the oracle; options are also those of ``both``."""
    masks = {n: x for n, x in options.items() if n not in {"own", "deterministic"}}
    q, k, v, dout = given
    bounds = error_bound(q, k, v, dout, dlse=dlse, **masks)
    attention, grads = both(given, dlse=dlse, **options)
    assert_attention_close(attention, reference.forward(q, k, v, **masks), bounds)
    expected = reference.backward(dout, q, k, v, dlse=dlse, **masks)
    assert_attention_close(grads, expected, bounds)
    return grads
