"""Which kernels are worth compiling ahead of time, and which stand for all of them in tests."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from tileattn.dtypes import BFLOAT16, DTYPES
from tileattn.kernels.config.hopper import HOPPER, HOPPER_BACKWARDS, HOPPER_FINISH
from tileattn.kernels.config.key import KernelKey
from tileattn.kernels.config.select import SHARED_LIMIT, TILED, Facts, choose
from tileattn.kernels.config.tiles import candidates
from tileattn.kernels.launch.call import WIDEST
from tileattn.kernels.launch.steps import backward_steps, forward_steps
from tileattn.problem import Problem

# Options that a kernel is compiled for; all others are parameters of every kernel, though a right
# limit may decide about tiles.
_OPTIONS = ({"softcap", "mask"}, {"alibi_slopes", "bias"}, {"block_mask", "dropout_p"})

_HEAD_DIMS = (20, 64, 128, 256)
_MASK_BLOCK = 128  # keys, as a block mask has them where nothing else is said

_MEASURED = "sm_90a"  # an H200

# Every kernel once: those of a set are compiled for the same problem.
_SETS = (
    {"forward", "plain_forward"},
    {"backward_rows", "backward_keys", "backward_finish", "plain_keys"},
    {"backward_queries", "plain_queries", "backward_renormalise", "plain_renormalise"},
    {"backward_bias", "backward_sinks", "plain_bias"},
)

WINDOWS: tuple[tuple[None, int | None], ...] = ((None, None), (None, 0))
"""Without and with a right limit, by which Hopper's own kernels have their tiles."""

_HOPPERS = (HOPPER, *HOPPER_BACKWARDS)
_OF_HOPPER = (*_HOPPERS, HOPPER_FINISH)

# For Hopper's own kernels: the widths that calls without options leave out, and its options.
_HOPPER_CASES = (
    ("float16", 32, {"softcap"}),
    ("bfloat16", 96, {"alibi_slopes"}),
    ("float16", 192, {"softcap", "alibi_slopes"}),
    ("bfloat16", 256, {"sinks"}),
    ("float16", 64, {"block_mask"}),
    ("bfloat16", 128, {"block_mask", "softcap"}),
)


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
    facts = facts_of(arch)
    choices = product(dtypes, list(head_dims), WINDOWS)
    problems = (replace(problem_of(dtype, dim), window=window) for dtype, dim, window in choices)
    return list(dict.fromkeys(key for P in problems for key in _keys(P, facts)))


def representative_keys(arch: str, turn: int) -> list[KernelKey]:
    """List a few kernels of every source; turns together have every dtype, option and width.

    Parameters
    ----------
    arch : str
        Architecture, as in ``"sm_90a"``.
    turn : int
        Which of the combinations; seven turns in a row have enough of them.

    Returns
    -------
    list of KernelKey
        Without duplicates.
    """
    found: dict[KernelKey, None] = {}
    adds = turn % 2 == 0
    for n, kernels in enumerate(_SETS, turn):
        dtype, bias = DTYPES[n % len(DTYPES)], DTYPES[n % len(DTYPES) - 1]
        uses = _OPTIONS[n % len(_OPTIONS)] | {"sinks"}
        shape = (1, 1, 1, 2)  # as the scores: its gradient comes with that of the keys
        if "backward_bias" in kernels:
            uses, shape = uses | {"bias"}, (1, 1, 1, 1)
        facts = facts_of(arch, WIDEST if turn % 3 else dtype.itemsize)
        if "bias" in uses:
            staged = WIDEST if turn % 2 else 0
            facts = facts._replace(bias=bias.name, bias_shape=shape, bias_vector=staged)
        if "block_mask" in uses:
            facts = facts._replace(mask_block=_MASK_BLOCK)
        if "mask" in uses:
            facts = facts._replace(span=(1, 2, 16)[turn % 3])
        # No tile has room for 512 columns: the textbook kernels serve them.
        for dim in (_HEAD_DIMS[turn % len(_HEAD_DIMS)], 512):
            keys = _keys(problem_of(dtype.name, dim, uses), facts)
            found |= dict.fromkeys(key for key in keys if key.kernel in kernels)
    for name, dim, options in _HOPPER_CASES:
        for window in WINDOWS:
            problem = replace(problem_of(name, dim, options), window=window)
            keys = _keys(problem, facts_of(arch))
            own = (key for key in keys if key.kernel in _OF_HOPPER or key.repairs)
            found |= dict.fromkeys(own)
    return [
        key for key in found if key.kernel != "backward_keys" or key.repairs or key.add_dq == adds
    ]


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
        False for kernels without tiles, on other GPUs than the one that was measured, and for
        options: what was measured is the plain call.
    """
    options = (key.bias, key.softcap, key.alibi, key.mask, key.block_mask, key.dropout)
    if key.kernel not in {*TILED, *_HOPPERS} or arch != _MEASURED or any(options):
        return False
    if key.kernel in _HOPPERS:
        rows = candidates(key.kernel, 2, max(key.head_dim, key.value_dim))
        return any(row.tuned and row[:2] == (key.block_q, key.block_k) for row in rows)
    problem = replace(problem_of(key.dtype, key.head_dim), Dv=key.value_dim)
    return choose(key.kernel, problem, facts_of(arch, key.vector)).tuned


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
        With one query and two keys.
    """
    names = frozenset(uses)
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    softcap, dropped = (1.0 if "softcap" in names else None), float("dropout_p" in names) / 2
    return Problem(
        *(1, 1, 1, 1, 2, dim, dim), kind, 1.0, softcap, (None, None), dropped, 0, 4, names
    )


def facts_of(arch: str, vector: int = WIDEST) -> Facts:
    """Give the facts about plain arrays on a GPU of a named architecture.

    Parameters
    ----------
    arch : str
        Architecture, as in ``"sm_90a"``.
    vector : int
        Bytes at whose multiples every row starts.

    Returns
    -------
    Facts
        Without a bias.
    """
    number = int("".join(c for c in arch.split("_")[1] if c.isdigit()))
    limit = SHARED_LIMIT[max(n for n in SHARED_LIMIT if n <= number)] * 1024
    return Facts(vector, limit, arch=arch)


def _keys(problem: Problem, facts: Facts) -> Iterator[KernelKey]:
    """List the kernels of both passes, of the backward one in either order of its sums."""
    sinks = "sinks" in problem.uses
    for step in forward_steps(problem, facts):
        yield step.key
    for deterministic in (False, True):
        for step in backward_steps(problem, facts, deterministic=deterministic, sinks=sinks):
            yield step.key
