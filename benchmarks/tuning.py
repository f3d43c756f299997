"""List the tuned numbers of the CUDA kernels, and time what one saves on the GPU at hand.

    python -m tileattn bench tuning                            every number, and where it comes from
    python -m tileattn bench tuning --constant late_rows,late_dim
    python -m tileattn bench tuning --constant wave_keys --value 8192 32768

Calls whose plan the number changes run with the number as it is and with another value, mostly the
one that turns off what it decides, in turns. ``cost_percent`` is the time that the other value
adds: below 1 everywhere, the number may go. The file is tuning_NAME.json, one for each number.
"""

import argparse
import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import numpy as np

import tileattn
from benchmarks import report
from benchmarks.comparison import in_turn, spread
from benchmarks.configurations import (
    DTYPES,
    LENGTHS,
    PASSES,
    WINDOW_LENGTHS,
    Call,
    Configuration,
    Shapes,
    grid_of,
    shapes_of,
)
from benchmarks.device import Gpu
from benchmarks.planned import planned
from benchmarks.report import Row
from tileattn.call.parse import parse
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import PLAIN
from tileattn.kernels.cuda.plan.device import Device, device_of_arch
from tileattn.kernels.cuda.plan.layout import CallLayout, contiguous, contiguous_inputs
from tileattn.kernels.cuda.plan.plan import LaunchPlan, plan_backward, plan_forward
from tileattn.kernels.cuda.tuning import TunedNumber, tuned_numbers

NUMBERS = {number.name: number for number in tuned_numbers()}
MOST_CALLS = 8  # of a number that changes more
MORE_LENGTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)

OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 20.0},
    "dropout": {"dropout_p": 0.1, "seed": 1},
    "documents": {"mask_mod": lambda _b, _h, i, j: i // 1000 == j // 1000},
}


class Case(NamedTuple):
    """One pass over one problem, on contiguous arrays."""

    configuration: Configuration
    deterministic: bool = False
    option: str = ""  # a name of `OPTIONS`
    queries: int | None = None  # if not as many as keys
    latent: bool = False  # values are columns of the keys
    bias: bool = False  # for all batch entries, with its gradient

    def options(self, xp: Any = np) -> dict[str, Any]:
        found = self.configuration.mask.options() | OPTIONS.get(self.option, {})
        if self.bias:
            (_, H, Nq, _), (*_, Nk, _) = self.shapes[:2]
            found["bias"] = xp.zeros((1, H, Nq, Nk), DTYPES[self.configuration.dtype])
        return found

    @property
    def shapes(self) -> Shapes:
        q, k, v, dout = self.configuration.shapes
        Nq = self.queries or self.configuration.N
        return (*q[:2], Nq, q[3]), k, v, (*dout[:2], Nq, dout[3])

    def row(self) -> Row:
        given = {"deterministic": self.deterministic, "option": self.option, "Nq": self.queries}
        given["bias"] = self.bias
        return self.configuration.row() | {name: x for name, x in given.items() if x}

    def problem(self) -> Problem:
        """Describe the problem, without arrays."""
        dtype = DTYPES[self.configuration.dtype]
        q, k, v = (np.broadcast_to(np.zeros((), dtype), shape) for shape in self.shapes[:3])
        return parse(q, k, v, self.options())[0]

    def plan(self, problem: Problem, layout: CallLayout, device: Device) -> LaunchPlan:
        if self.configuration.kind == "forward":
            return plan_forward(problem, layout, device)
        return plan_backward(problem, layout, device, deterministic=self.deterministic)


def cases() -> list[Case]:
    """List the calls that a number may change."""
    causals, half = (False, True), ("bf16",)
    plain = grid_of(half, (64, 96, 128, 256), MORE_LENGTHS, PASSES, causals)
    plain += [one for _, one in shapes_of(half, MORE_LENGTHS, WINDOW_LENGTHS, PASSES, causals)]
    plain += [
        Configuration(kind, "bf16", 65536 // N, 16, N, D, causal, Hkv=heads, window=N // part)
        for kind, N, causal in product(PASSES, (2048, 4096, 8192), causals)
        for D, heads, part in product((64, 128), (2, 4, 16), (2, 3, 8))
    ]
    # A head that exceeds the L2 cache, long heads that share keys, and float32 and float64.
    plain += [Configuration(kind, "bf16", 1, 2, 1 << 17, 128, True) for kind in PASSES]
    plain += [Configuration("backward", "bf16", 1, 16, 32768, 128, True, Hkv=n) for n in (2, 4)]
    plain += grid_of(("f32", "f64"), (64, 128), (1024, 4096, 16384), PASSES, causals)
    found = [Case(one) for one in plain]
    found += [Case(one, deterministic=True) for one in plain if one.kind == "backward"]
    dense = grid_of(half, (64, 128), (512, 2048, 8192), PASSES, causals)
    found += [Case(one, option=option) for option in OPTIONS for one in dense]
    found += [
        Case(Configuration("forward", "bf16", B, 32, N, D, Hkv=heads), queries=Nq)
        for B, N in ((1, 65536), (16, 128), (16, 1024), (16, 8192))
        for D, heads, Nq in product((64, 128, 256), (32, 8, 1), (1, 4))
    ]
    found += [
        Case(Configuration("forward", "bf16", 8, 32, N, 128, Hkv=4), queries=Nq)
        for N, Nq in product((1024, 8192), (8, 32))
    ]
    found += [Case(Configuration("forward", "bf16", 1, 8, N, 128, True)) for N in (2048, 4096)]
    found += [Case(Configuration("forward", "bf16", 4, 16, 120, D), queries=4096) for D in (72, 96)]
    # Cross attention over few keys; windows, pair representations and texts with a bias.
    found += [Case(Configuration("backward", "bf16", 4, 10, 128, 64), queries=N) for N in LENGTHS]
    found += [
        Case(Configuration("backward", "bf16", B, 6, N, D), bias=True)
        for B, N, D in ((1024, 49, 32), (128, 384, 32), (16, 512, 64))
    ]
    found += [Case(Configuration(kind, "f32", 4, 10, 77, 64), queries=4096) for kind in PASSES]
    found += [Case(Configuration("backward", "f32", 256, 6, N, 32), bias=True) for N in (144, 320)]
    latent = (Configuration("forward", "bf16", 16, 16, N, 576, Hkv=1, Dv=512) for N in LENGTHS)
    return found + [Case(one, queries=1, latent=True) for one in latent]


@lru_cache(maxsize=2)
def problems() -> list[tuple[Case, Problem, CallLayout]]:
    """Describe the arrays of all calls."""
    found = []
    for case in cases():
        problem = case.problem()
        layout = contiguous_inputs(problem)._replace(v_is_k=case.latent)
        bias = case.options().get("bias")
        if bias is not None:
            layout = layout.with_arrays(bias=contiguous(bias.shape, problem.dtype.name))
        kind = case.configuration.kind
        found.append((case, problem, layout.with_contiguous_results(problem, kind)))
    return found


@lru_cache(maxsize=2)
def plans(device: Device) -> list[tuple[Any, ...]]:
    """Plan all calls with the tuned numbers of a device."""
    return [launched(case.plan(problem, layout, device)) for case, problem, layout in problems()]


def changed(number: TunedNumber, value: Any, device: Device) -> Iterator[Case]:
    """Yield the calls whose plan differs with another value of a number."""
    other = with_value(number, value, device)
    for mine, (case, problem, layout) in zip(plans(device), problems(), strict=True):
        if mine != launched(case.plan(problem, layout, other)):
            yield case


def launched(plan: LaunchPlan) -> tuple[Any, ...]:
    """Return the part of a plan that a GPU notices."""
    launches = [launch._replace(why="", traits=PLAIN) for launch in plan.launches]
    return launches, plan.fields, plan.constants, plan.workspace


def with_value(number: TunedNumber, value: Any, device: Device) -> Device:
    """Return a device on which a tuned number has another value."""
    return replace(device, tuning=replace(device.tuning, **{number.name: value}))


def some(found: Sequence[Case], most: int) -> list[Case]:
    """Pick calls evenly from a list."""
    step = max(1.0, len(found) / most)
    return [found[int(n * step)] for n in range(min(most, len(found)))]


def prepared(case: Case, number: TunedNumber, value: Any, device: Gpu) -> Call:
    """Return a call that runs a pass with a value of a number, on sets of inputs in turn."""
    calls = []
    for x in device.inputs(case.shapes, case.configuration.dtype):
        v = x.k[..., : x.v.shape[-1]] if case.latent else x.v
        options = case.options(device.xp)
        problem, operands = parse(x.q, x.k, v, options)
        out, lse = tileattn.forward(x.q, x.k, v, **options)
        given = {"q": x.q, "k": x.k, "v": v} | ({"bias": options["bias"]} if case.bias else {})
        arrays = given | {"out": out, "lse": lse}
        if case.configuration.kind == "backward":
            arrays["dout"] = x.dout
            arrays |= {f"d{name}": device.xp.empty_like(x) for name, x in given.items()}

        def plan_of(layout: CallLayout, gpu: Device, problem: Problem = problem) -> LaunchPlan:
            return case.plan(problem, layout, with_value(number, value, gpu))

        calls.append(planned(arrays, operands, plan_of))
    return in_turn(calls)


def compared(case: Case, number: TunedNumber, value: Any, device: Gpu) -> Row:
    """Time a call with the number as it is, and with another value, in turns."""
    calls = [prepared(case, number, x, device) for x in (number.value, value)]
    times = device.time_each(calls)
    mine, theirs = map(median, times)
    device.release()
    return case.row() | {
        **{"value": number.value, "other": value, "ms": 1e3 * mine, "other_ms": 1e3 * theirs},
        "cost_percent": 100 * (theirs / mine - 1),
        "spread": max(map(spread, times)),
    }


def rows(number: TunedNumber, chosen: dict[Any, list[Case]], device: Gpu) -> Iterator[Row]:
    """Time the calls that were chosen for each value."""
    for value, found in chosen.items():
        for case in found:
            yield {"constant": number.name} | compared(case, number, value, device)


def gpu_at_hand() -> Device:
    """Describe the current device, or an H200 if there is none."""
    if tileattn.available_backends()["cupy"] is not None:
        return device_of_arch("sm_90a")
    import cupy

    from tileattn.backends.cupy.describe import device_of

    return device_of(cupy.cuda.runtime.getDevice())


def described(number: TunedNumber) -> str:
    """Write a number, what it decides and where it comes from."""
    file = report.RESULTS / f"tuning_{number.name}.json"
    source = f"benchmarks/results/{file.name}" if file.exists() else number.source.text
    return (
        f"{number.name} = {number.value}  [{number.unit}]  {number.condition}\n"
        f"    {number.source.gpu}; {source}"
    )


def main(argv: list[str] | None = None, device: Gpu | None = None) -> None:
    """List the numbers, or time the calls that some of them change."""
    parser = report.parser("tuning", __doc__)
    parser.add_argument("--constant", type=partial(report.names, tuple(NUMBERS)), help="names")
    parser.add_argument("--value", nargs="+", type=ast.literal_eval, help="others to compare with")
    parser.add_argument("--most", type=int, default=MOST_CALLS, help=f"calls ({MOST_CALLS})")
    arguments: argparse.Namespace = report.parsed(parser, argv)
    if not arguments.constant:
        print("\n".join(map(described, NUMBERS.values())))
        return
    known, chosen = gpu_at_hand(), dict[str, dict[Any, list[Case]]]()
    for name in arguments.constant:
        number = NUMBERS[name]
        values = arguments.value or [number.alternative]
        print(described(number))
        chosen[name] = {}
        for value in values:
            found = list(changed(number, value, known))
            chosen[name][value] = some(found, arguments.most)
            print(f"    {value} changes {len(found)} calls; timed are")
            print("\n".join(f"    {report.line(case.row())}" for case in chosen[name][value]))
    device = device or Gpu.required()
    for name, of_values in chosen.items():
        path = arguments.to / f"tuning_{name}.json"
        report.written(rows(NUMBERS[name], of_values, device), path, device.machine, arguments.ran)


if __name__ == "__main__":
    main()
