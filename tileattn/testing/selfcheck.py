"""Compare random problems with the oracle: ``python -m tileattn check``."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from tileattn import reference
from tileattn.backends import registry
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.call.parse import parse
from tileattn.dtypes import DTYPES
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import compiled
from tileattn.kernels.cuda.jit.load import arch_of
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.host_arrays import host_layout
from tileattn.kernels.cuda.plan.plan import plans_of
from tileattn.results import Attention, Gradients
from tileattn.testing import AttentionCase, assert_attention_close, error_bound
from tileattn.testing.functions import MASKS, SCORES, draw_functions
from tileattn.testing.options import DRAW, Choices
from tileattn.testing.strategies import draw_case

BATCH = 100  # problems whose kernels are compiled at once


class Family(NamedTuple):
    """The facts that decide which kernels a problem needs, except the layout of its arrays."""

    dtype: np.dtype[Any]
    D: int
    Dv: int
    options: tuple[str, ...]
    score_mod: str | None = None  # of the functions in tileattn.testing.functions
    mask_mod: str | None = None

    @classmethod
    def draw(cls, choices: Choices, widest: int) -> "Family":
        """Draw a family: each option is in a third of one half, and in few of the other half.

        A backend that supports a few options gets problems from that other half.
        """
        D, Dv = choices.integer(1, widest), choices.integer(1, widest)
        if choices.coin():
            D, Dv = -(-D // 8) * 8, -(-Dv // 8) * 8
        rarity = choices.one_of(3, 20)
        options = tuple(name for name in DRAW if choices.integer(1, rarity) == 1)
        score_mod = choices.one_of(*[None] * rarity, *SCORES)
        mask_mod = choices.one_of(*[None] * rarity, *MASKS)
        return cls(choices.one_of(*DTYPES), D, Dv, options, score_mod, mask_mod)


class Case(NamedTuple):
    """A problem on the host, and how a backend computes it."""

    call: AttentionCase
    tile: tuple[int, int]  # for a backend that takes it
    deterministic: bool

    @classmethod
    def draw(cls, choices: Choices, family: Family, **limits: Any) -> "Case":
        """Draw a problem of a family, as `draw_case` does."""
        tile = choices.integer(1, 69), choices.integer(1, 69)
        call = draw_case(choices, family[:4], ranks=(4,), **limits)
        shape = *call.q.shape[:3], call.k.shape[2]
        own = draw_functions(choices, family.score_mod, family.mask_mod, shape)
        return cls(call._replace(options=call.options | own), tile, choices.coin())

    def __str__(self) -> str:
        q, k, v = self.call[:3]
        kind = "fixed order" if self.deterministic else "any order"
        return (
            f"{q.dtype} B{len(q)} H{q.shape[1]}/{k.shape[1]} N{q.shape[2]}x{k.shape[2]} "
            f"D{q.shape[3]}/{v.shape[3]} tile {self.tile[0]}x{self.tile[1]} {kind} "
            f"{' '.join(self.call.options)}"
        )


def cases(
    rng: np.random.Generator,
    backend: str,
    families: int,
    progress: Callable[[float, str], None] = lambda _, __: None,
) -> Iterator[Case]:
    """Draw problems without end; for CuPy, of a few families, so that fewer kernels compile."""
    choices = Choices(rng)
    if backend != "cupy":
        while True:
            yield Case.draw(choices, Family.draw(choices, 40), max_length=100)
    drawn = [Family.draw(choices, 130) for _ in range(families)]

    def on_gpu(seed: int) -> Case:
        """Draw a problem of contiguous arrays, which CuPy copies as they are."""
        limits = {"edges": ("Nq", "Nk", "B", "Hq"), "layouts": ("plain",), "max_length": 250}
        return Case.draw(Choices(np.random.default_rng(seed)), drawn[seed % families], **limits)

    while True:
        seeds = [choices.integer(0, 2**63) for _ in range(BATCH)]
        compile_all(map(on_gpu, seeds), progress)
        yield from map(on_gpu, seeds)


def compile_all(drawn: Iterable[Case], progress: Callable[[float, str], None]) -> None:
    """Compile the kernels of problems on all cores; ``progress`` gets the fraction and a line."""
    import cupy

    from tileattn.backends.cupy.describe import device_of

    ordinal = cupy.cuda.runtime.getDevice()
    arch, device = arch_of(ordinal), device_of(ordinal)
    keys = dict.fromkeys(key for case in drawn for key in kernels(case, device))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, _ in enumerate(pool.map(lambda key: compiled(key, arch), keys), 1):
            progress(done / len(keys), f"compiled {done} of {len(keys)} kernels")


def kernels(case: Case, device: Device) -> list[KernelKey]:
    """List the kernels of both passes, for arrays that lie on a device as they do on the host."""
    problem, x = parse(case.call.q, case.call.k, case.call.v, case.call.options)
    forward, *backward = plans_of(problem, host_layout(x), device, tables=False)
    plans = forward, backward[case.deterministic]
    return [launch.key for plan in plans for launch in plan.launches]


def check(case: Case, backend: str) -> bool:
    """Compare every result of both passes with the float64 oracle; raise AssertionError.

    Return False for a problem that the backend does not support.
    """
    q, k, v, dout, dlse, options = case.call
    if registry.get(backend).why_not(parse(q, k, v, options)[0]) is not None:
        return False
    attention, gradients = _run(case, backend)
    bounds = error_bound(q, k, v, dout, dlse=dlse, **options)
    try:
        assert_attention_close(attention, reference.forward(q, k, v, **options), bounds)
        expected = reference.backward(dout, q, k, v, dlse=dlse, **options)
        assert_attention_close(gradients, expected, bounds)
    except AssertionError as failure:
        raise AssertionError(f"{case}: {failure}") from failure
    return True


def _run(case: Case, backend: str) -> tuple[Attention, Gradients]:
    engine: Any = registry.get(backend)
    if backend == "numpy":
        engine = NumpyBackend(case.tile, case.tile)
    sent = sender(engine)
    q, k, v, dout, dlse = map(sent, case.call[:-1])
    options = {name: sent(x) for name, x in case.call.options.items()}
    problem, operands = parse(q, k, v, options)
    attention = engine.forward(problem, operands, None)
    gradients = engine.backward(problem, operands, dout, attention, dlse, case.deterministic)
    if gradients.dbias is not None:  # with the axes that the bias lacks
        gradients = gradients._replace(dbias=gradients.dbias.reshape(options["bias"].shape))
    return attention, gradients


def sender(backend: Any) -> Callable[[Any], Any]:
    """Return a function that copies NumPy arrays, also in a tuple, to those of a backend.

    A backend that does not own NumPy arrays has a method ``asarray``; other values stay.
    """
    if backend.owns(np.zeros(0)):
        return lambda x: x
    if backend.name == "cupy":
        from cupy import asarray
    else:
        asarray = backend.asarray

    def send(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(send, x))
        return asarray(x) if isinstance(x, np.ndarray) else x

    return send
