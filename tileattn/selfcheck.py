"""Random problems against the oracle: what ``python -m tileattn check`` runs."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tileattn import reference
from tileattn.algorithm.block_mask import BlockMask
from tileattn.backends import registry
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.kernels.config.families import backward_launches, forward_launches
from tileattn.kernels.config.key import KernelKey
from tileattn.kernels.jit.compile import compiled
from tileattn.kernels.jit.load import arch_of
from tileattn.kernels.launch import catalog
from tileattn.kernels.launch.layout import MAX_ALIGNMENT
from tileattn.problem import parse
from tileattn.results import Attention, Gradients
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

DTYPES = tuple(np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))


class Family(NamedTuple):
    """What decides which kernels a problem needs.

    Parameters
    ----------
    dtype : numpy.dtype
        Of q, k and v.
    D, Dv : int
        Head dimensions.
    options : tuple of str
        Options in use.
    """

    dtype: np.dtype[Any]
    D: int
    Dv: int
    options: tuple[str, ...]

    @classmethod
    def draw(cls, rng: np.random.Generator, widest: int = 40) -> "Family":
        """Draw a family whose head dimensions are below ``widest``."""
        D, Dv = (int(n) for n in rng.integers(1, widest, 2))
        if rng.random() < 0.5:
            D, Dv = -(-D // 8) * 8, -(-Dv // 8) * 8
        options = tuple(name for name in DRAWS if rng.random() < 1 / 3)
        return cls(DTYPES[rng.integers(len(DTYPES))], D, Dv, options)

    def keys(self, arch: str) -> Iterator[KernelKey]:
        """List the CUDA kernels of both passes over contiguous arrays, which may be empty."""
        problem = replace(catalog.problem_of(self.dtype.name, self.D, self.options), Dv=self.Dv)
        row = math.gcd(MAX_ALIGNMENT, *(n * self.dtype.itemsize for n in (self.D, self.Dv)))
        biased = "bias" in self.options
        # A bias as large as the scores has its gradient written with that of the keys; rows of an
        # odd length are aligned to 8 bytes.
        shapes = ((1, 1, 1, 1), (1, 1, 1, problem.Nk)) if biased else ((),)
        alignments = (0, 8, 16) if biased else (0,)
        widths = (1, 2, 16) if "mask" in self.options else (1,)
        for shape, alignment, width in product(shapes, alignments, widths):
            bias = "float64" if biased else ""
            context = catalog.context_of(arch, row)._replace(
                bias=bias,
                bias_shape=shape,
                mask_vector_width=width,
                bias_alignment_bytes=alignment,
            )
            for keys, window in product((problem.Nk, 0), catalog.WINDOWS):
                asked = replace(problem, Nk=keys, window=window)
                yield from (launch.key for launch in forward_launches(asked, context))
            empty = replace(problem, Nq=0), replace(problem, Nk=0)
            for asked, fixed in product((problem, *empty), (False, True)):
                sinks = "sinks" in self.options
                launches = backward_launches(asked, context, deterministic=fixed, sinks=sinks)
                yield from (launch.key for launch in launches)


class Case(NamedTuple):
    """A problem on the host, and how it is put.

    Parameters
    ----------
    arrays : list of array
        q, k, v and dout.
    options : dict
        Options of the call.
    tile : (int, int)
        Tile sizes, for a backend that takes them.
    deterministic : bool
        Argument of ``backward``.
    """

    arrays: list[Any]
    options: dict[str, Any]
    tile: tuple[int, int]
    deterministic: bool

    @classmethod
    def draw(cls, rng: np.random.Generator, family: Family, longest: int = 100) -> "Case":
        """Draw sizes below ``longest``, now and then 0 or 1, and what the arrays hold."""
        dtype, D, Dv, names = family
        B, Hkv, group = (int(n) for n in rng.integers(1, 3, 3))
        Nq, Nk = (
            int(rng.integers(2)) if rng.random() < 0.05 else int(rng.integers(1, longest))
            for _ in range(2)
        )
        shape = (B, Hkv * group, Nq, Nk)
        shapes = ((*shape[:2], Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, Dv), (*shape[:2], Nq, Dv))
        arrays = [rng.standard_normal(size).astype(dtype) for size in shapes]
        options = {name: DRAWS[name](rng, shape) for name in names}
        tile = int(rng.integers(1, 70)), int(rng.integers(1, 70))
        return cls(arrays, options, tile, bool(rng.integers(2)))

    def __str__(self) -> str:
        q, k, v, _ = self.arrays
        kind = "fixed order" if self.deterministic else "any order"
        return (
            f"{q.dtype} B{len(q)} H{q.shape[1]}/{k.shape[1]} N{q.shape[2]}x{k.shape[2]} "
            f"D{q.shape[3]}/{v.shape[3]} tile {self.tile[0]}x{self.tile[1]} {kind} "
            f"{' '.join(self.options)}"
        )


def cases(
    rng: np.random.Generator,
    backend: str,
    families: int,
    progress: Callable[[float, str], None] = lambda _, __: None,
) -> Iterator[Case]:
    """Draw problems without end.

    Parameters
    ----------
    rng : numpy.random.Generator
        What they are drawn from.
    backend : str
        ``"numpy"`` or ``"cupy"``.
    families : int
        How many families the problems for CuPy are of; their kernels are compiled at once.
    progress : callable
        Told of the compiling: the share that is done, and a line.

    Yields
    ------
    Case
        A problem.
    """
    if backend == "numpy":
        while True:
            yield Case.draw(rng, Family.draw(rng))
    drawn = [Family.draw(rng, widest=130) for _ in range(families)]
    compile_all(drawn, progress)
    while True:
        yield Case.draw(rng, drawn[rng.integers(families)], longest=250)


def compile_all(families: Iterable[Family], progress: Callable[[float, str], None]) -> None:
    """Compile the CUDA kernels of some families on all cores, for the current GPU.

    Parameters
    ----------
    families : iterable of Family
        What is going to be checked.
    progress : callable
        Told the share that is done, and a line.
    """
    import cupy

    arch = arch_of(cupy.cuda.runtime.getDevice())
    keys = dict.fromkeys(key for family in families for key in family.keys(arch))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, _ in enumerate(pool.map(lambda key: compiled(key, arch), keys), 1):
            progress(done / len(keys), f"{done} of {len(keys)} kernels are compiled")


def check(case: Case, backend: str) -> None:
    """Hold every result of both passes to the float64 oracle.

    Parameters
    ----------
    case : Case
        The problem.
    backend : str
        ``"numpy"`` or ``"cupy"``.

    Raises
    ------
    AssertionError
        Where a result is further off than the accuracy promise allows.
    """
    q, k, v, dout = case.arrays
    attention, gradients = _run(case, backend)
    bounds = error_bound(q, k, v, dout, **case.options)
    try:
        assert_attention_close(attention, reference.forward(q, k, v, **case.options), bounds)
        expected = reference.backward(dout, q, k, v, **case.options)
        assert_attention_close(gradients, expected, bounds)
    except AssertionError as failure:
        raise AssertionError(f"{case}: {failure}") from failure


def _run(case: Case, backend: str) -> tuple[Attention, Gradients]:
    if backend == "numpy":
        engine: Any = NumpyBackend(case.tile, case.tile)
        arrays, options = case.arrays, case.options
    else:
        import cupy

        engine = registry.get(backend)
        arrays = [cupy.asarray(x) for x in case.arrays]
        options = {
            name: cupy.asarray(x) if isinstance(x, np.ndarray) else x
            for name, x in case.options.items()
        }
    q, k, v, dout = arrays
    problem, operands = parse(q, k, v, options)
    attention = engine.forward(problem, operands, None)
    gradients = engine.backward(problem, operands, dout, attention, None, case.deterministic)
    if backend != "numpy":
        attention = Attention(*(x.get() for x in attention))
        gradients = Gradients(*(x if x is None else x.get() for x in gradients))
    return attention, gradients
