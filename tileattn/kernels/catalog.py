"""Which kernels are worth compiling ahead of time, and which stand for all of them in tests."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from tileattn.kernels.call import WIDEST
from tileattn.kernels.key import KernelKey
from tileattn.kernels.select import SHARED_LIMIT, choose
from tileattn.kernels.steps import Facts, backward_steps, forward_steps
from tileattn.problem import BFLOAT16, DTYPES, Problem

_OPTIONS = ("softcap", "alibi_slopes", "bias", "mask", "block_mask", "dropout_p")
"""Options that a kernel is compiled for; all others are parameters of every kernel."""


def common_keys(arch: str, dtypes: Iterable[str], head_dims: Iterable[int]) -> list[KernelKey]:
    """List the kernels that calls without options need.

    Parameters
    ----------
    arch : str
        Architecture, as in ``"sm_90a"``.
    dtypes : iterable of str
        Element types.
    head_dims : iterable of int
        Head dimensions.

    Returns
    -------
    list of KernelKey
        For the forward pass, and for the backward pass of either kind.
    """
    facts = Facts(WIDEST, shared_limit_of(arch))
    problems = (problem_of(dtype, dim) for dtype, dim in product(dtypes, list(head_dims)))
    return list(dict.fromkeys(key for P in problems for key in _keys(P, facts)))


def representative_keys(arch: str) -> list[KernelKey]:
    """List kernels of every source, dtype, option and way of loading.

    Parameters
    ----------
    arch : str
        Architecture, as in ``"sm_90a"``.

    Returns
    -------
    list of KernelKey
        Without duplicates.
    """
    names = [dtype.name for dtype in DTYPES]
    facts = Facts(WIDEST, shared_limit_of(arch))
    keys = dict.fromkeys(common_keys(arch, names, (64,)))
    keys |= dict.fromkeys(common_keys(arch, ("float16", "float32"), (128,)))
    keys |= dict.fromkeys(common_keys(arch, ("bfloat16", "float64"), (256,)))
    for n, dtype in enumerate(names):
        problem = problem_of(dtype, 64, _OPTIONS[n % 3 :: 3])
        keys |= dict.fromkeys(_keys(problem, facts, bias=names[n - 1]))
    keys |= dict.fromkeys(_keys(problem_of("float16", 20), facts._replace(vector=2)))
    keys |= dict.fromkeys(_keys(problem_of("float32", 64, {"sinks"}), facts))
    for dtype in ("float16", "float64"):  # no tiled kernel has room for these
        keys |= dict.fromkeys(_keys(problem_of(dtype, 512, {"bias"}), facts, bias=dtype))
    return list(keys)


def is_tuned(key: KernelKey, arch: str) -> bool:
    """Whether the tiles of a kernel were chosen by measurement.

    Parameters
    ----------
    key : KernelKey
        The kernel.
    arch : str
        Architecture, as in ``"sm_90a"``.

    Returns
    -------
    bool
        False for kernels without tiles.
    """
    if key.kernel not in {"forward", "backward_keys", "backward_queries", "backward_bias"}:
        return False
    problem = replace(problem_of(key.dtype, key.head_dim), Dv=key.value_dim)
    return choose(key.kernel, problem, key.vector, key.bias, shared_limit_of(arch)).tuned


def problem_of(dtype: str, dim: int, uses: Iterable[str] = ()) -> Problem:
    """Make a problem that needs the kernels for some options.

    Parameters
    ----------
    dtype : str
        Element type.
    dim : int
        Head dimension of keys and of values.
    uses : iterable of str
        Options.

    Returns
    -------
    Problem
        With one query and one key.
    """
    names = frozenset(uses)
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    softcap, dropped = (1.0 if "softcap" in names else None), float("dropout_p" in names) / 2
    return Problem(
        *(1, 1, 1, 1, 1, dim, dim), kind, 1.0, softcap, (None, None), dropped, 0, 4, names
    )


def shared_limit_of(arch: str) -> int:
    """Give the bytes of shared memory that a block may have on a named architecture."""
    number = int("".join(c for c in arch.split("_")[1] if c.isdigit()))
    return SHARED_LIMIT[max(n for n in SHARED_LIMIT if n <= number)] * 1024


def _keys(problem: Problem, facts: Facts, bias: str = "") -> Iterator[KernelKey]:
    if "bias" in problem.uses:
        facts = facts._replace(bias=bias, bias_shape=(1, 1, 1, 1))
    sinks = "sinks" in problem.uses
    for step in forward_steps(problem, facts):
        yield step.key
    for deterministic in (False, True):
        for step in backward_steps(problem, facts, deterministic=deterministic, sinks=sinks):
            yield step.key
