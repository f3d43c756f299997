"""Libraries that compute the same call, timed in turns and compared with tileattn."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any

from benchmarks.configurations import PASSES, Call
from benchmarks.device import AGREEMENT, Gpu, difference
from benchmarks.libraries import Library, Step
from benchmarks.report import Row, one_line
from benchmarks.tensors import arrays

Wrap = Callable[[Library, Call], Call]


def compare(
    steps: Sequence[Step],
    libraries: Mapping[str, Library],
    device: Gpu,
    dtype: str,
    wrap: Wrap | None = None,
) -> Iterator[tuple[str, Row]]:
    """Yield each pass and its times; the first library is tileattn, and calls take turns.

    The steps differ in their arrays alone; a call cycles through them. ``wrap`` may change a call.
    """
    made: dict[str, list[list[Call]]] = {}  # of each library, by step and pass
    failed: dict[str, str] = {}
    mismatch: dict[str, str] = {}
    expected: list[Any] = []
    for name, library in libraries.items():
        try:
            found, calls = _prepared(library, steps, wrap, device.xp)
            if not calls:
                continue
            expected = expected or found
            distance = difference(found, expected, device.xp)
        # A library that does not fit the others installed may fail with anything.
        except Exception as error:
            failed[name] = one_line(error)
        else:
            made[name] = calls
            if "dropout_p" not in steps[0].options and not distance <= AGREEMENT[dtype]:
                mismatch[name] = f"{distance:.1e}"
        found = []
    ours = [name for name, library in libraries.items() if library.ours]
    for n, kind in enumerate(PASSES[: len(steps[0].rows) - 2]):
        calls_of = {name: in_turn([calls[n] for calls in x]) for name, x in made.items()}
        broken = dict(failed)
        times = time_in_turns(calls_of, device, broken)
        yield kind, figures(times, ours, mismatch) | {"failed": broken}


def _prepared(
    library: Library, steps: Sequence[Step], wrap: Wrap | None, xp: Any
) -> tuple[list[Any], list[list[Call]]]:
    """Return the results of the first step, and the calls of all steps."""
    with library.context():
        made = [library.passes(library.laid_out(step)) for step in steps]
        first = made[0]
        found = [x for call in first for x in arrays(library.heads_first(call), xp)]
        if wrap is not None:
            made = [[wrap(library, call) for call in calls] for calls in made]
    if not first:
        return [], []
    return found, [[partial(_inside, library, call) for call in calls] for calls in made]


def _inside(library: Library, call: Call) -> Any:
    with library.context():
        return call()


def in_turn(calls: Sequence[Call]) -> Call:
    """Return a call that cycles through calls."""
    turns = itertools.cycle(calls)

    def turn() -> Any:
        return next(turns)()

    return turn


def time_in_turns(
    calls: dict[str, Call], device: Gpu, failed: dict[str, str]
) -> dict[str, list[float]]:
    """Return the seconds of each repeat; time each call separately if they fail together."""
    try:
        return dict(zip(calls, device.time_each([*calls.values()]), strict=True)) if calls else {}
    # Calls that run alone may need more memory together; one alone may fail with anything.
    except Exception as error:
        device.release()
        if len(calls) == 1:
            failed |= dict.fromkeys(calls, one_line(error))
            return {}
    times: dict[str, list[float]] = {}
    for name, call in calls.items():
        times |= time_in_turns({name: call}, device, failed)
    return times


def figures(
    times: Mapping[str, Sequence[float]], ours: Sequence[str], mismatch: Mapping[str, str]
) -> Row:
    """Return microseconds, the spread, and the speedup of tileattn over each whose results agree.

    The first of ``ours`` is tileattn; the others are other ways to call it.
    """
    us = {name: 1e6 * median(seconds) for name, seconds in times.items()}
    own = us.get(ours[0])
    right = [name for name in us if name not in {*ours, *mismatch}]
    return {
        "us": {name: round(x, 2) for name, x in us.items()},
        "speedup_over": {name: round(us[name] / own, 3) for name in right} if own else {},
        "spread": {name: round(spread(seconds), 3) for name, seconds in times.items()},
        "mismatch": dict(mismatch),
    }


def spread(seconds: Sequence[float]) -> float:
    """Return the distance of the quartiles over the median."""
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle
