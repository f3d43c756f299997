"""Random problems against the oracle: what ``python -m tileattn check`` runs."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tileattn import reference
from tileattn.backends.numpy_backend import NumpyBackend
from tileattn.block_mask import BlockMask
from tileattn.problem import parse
from tileattn.testing import assert_attention_close, error_bound

Draw = Callable[[np.random.Generator, tuple[int, int, int, int]], Any]

DRAWS: dict[str, Draw] = {
    "scale": lambda rng, _: float(rng.uniform(0.05, 0.5)),
    "softcap": lambda rng, _: float(rng.uniform(1, 30)),
    "alibi_slopes": lambda rng, shape: rng.uniform(0, 0.5, shape[int(rng.integers(2)) : 2]),
    "bias": lambda rng, shape: rng.standard_normal(
        tuple(1 if rng.random() < 0.4 else n for n in shape)
    ),
    "causal": lambda _, __: True,
    "window": lambda rng, _: (int(rng.integers(0, 90)), None if rng.random() < 0.5 else 7),
    "mask": lambda rng, shape: rng.random(shape[2:]) < 0.7,
    "block_mask": lambda rng, shape: BlockMask.from_mask(rng.random(shape[2:]) < 0.02, (16, 24)),
    "kv_lengths": lambda rng, shape: rng.integers(0, shape[3] + 1, shape[0]),
    "q_offset": lambda rng, shape: rng.integers(-20, 40, shape[0]),
    "sinks": lambda rng, shape: rng.standard_normal(shape[1]),
    "dropout_p": lambda rng, _: float(rng.uniform(0, 0.6)),
    "seed": lambda rng, _: int(rng.integers(0, 1 << 62)),
}
"""How an option is drawn, given ``(B, Hq, Nq, Nk)``; each is used in about a third of problems."""

DTYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)


def check_one(rng: np.random.Generator) -> str:
    """Draw one problem and a tile, and hold every result to the float64 oracle.

    Parameters
    ----------
    rng : numpy.random.Generator
        What the problem is drawn from.

    Returns
    -------
    str
        The problem, in a line.

    Raises
    ------
    AssertionError
        Where a result is further off than the accuracy promise allows.
    """
    dtype = DTYPES[rng.integers(len(DTYPES))]
    B, Hkv, group = (int(n) for n in rng.integers(1, 3, 3))
    Nq, Nk = (int(n) for n in rng.integers(1, 100, 2))
    D, Dv = (int(n) for n in rng.integers(1, 40, 2))
    shape = (B, Hkv * group, Nq, Nk)
    options = {name: draw(rng, shape) for name, draw in DRAWS.items() if rng.random() < 1 / 3}
    q, k, v, dout = (
        rng.standard_normal(size).astype(dtype)
        for size in ((*shape[:2], Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv), (*shape[:2], Nq, Dv))
    )
    tile = (int(rng.integers(1, 70)), int(rng.integers(1, 70)))
    line = (
        f"{np.dtype(dtype)} B{B} H{shape[1]}/{Hkv} N{Nq}x{Nk} D{D}/{Dv} "
        f"tile {tile[0]}x{tile[1]} {' '.join(options)}"
    )
    backend = NumpyBackend(tile, tile)
    problem, operands = parse(q, k, v, options)
    attention = backend.forward(problem, operands, None)
    gradients = backend.backward(problem, operands, dout, attention, None, True)
    bounds = error_bound(q, k, v, dout, **options)
    try:
        assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
        assert_attention_close(gradients, reference.backward(dout, q, k, v, **options), bounds)
    except AssertionError as failure:
        raise AssertionError(f"{line}: {failure}") from failure
    return line
