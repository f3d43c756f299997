"""Name the calls that are faster in one table and slower in another.

    python -m tools.verdicts            the calls, with both files
    python -m tools.verdicts --check    exit status 1 if there are any

A call is the same in two tables if its pass, dtype, sizes, mask and options are. Its verdict beside
a baseline is faster, slower or, within the spread of the times, equal. Two verdicts contradict each
other if they differ and their ranges of speed do not overlap.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

from tools.comparisons import NAMES, Comparison, comparisons, label
from tools.results import read


class Contradiction(NamedTuple):
    """A call with two verdicts beside one baseline."""

    call: str
    baseline: str
    files: tuple[str, str]
    speeds: tuple[float, float]

    def __str__(self) -> str:
        (one, two), (fast, slow) = self.files, self.speeds
        return (
            f"{self.call}, beside {NAMES.get(self.baseline, self.baseline)}: "
            f"{fast:.2f} in `{one}`, {slow:.2f} in `{two}`"
        )


def verdict(one: Comparison, baseline: str) -> str:
    """Judge a speed: faster, equal or slower."""
    low, high = _range(one, baseline)
    return "faster" if low > 1 else "slower" if high < 1 else "equal"


def _range(one: Comparison, baseline: str) -> tuple[float, float]:
    speed, part = one.speeds[baseline], one.uncertainty(baseline)
    return speed * (1 - part), speed * (1 + part)


SIZES = ("pass", "dtype", "B", "H", "N", "D")
# The name of a case says no more than its sizes.
OTHERS = ("Hkv", "Nk", "Dv", "causal", "function", "schedule", "layout", "threads", "lengths")


def same_call(one: Comparison) -> tuple[Any, ...] | None:
    """Return a key that comparisons of the same call share, or None if some axis is unknown."""
    call = {"H": one.call.get("Hq"), "N": one.call.get("Nq"), **one.call}
    if one.file == "gpu_decode":
        call |= _cache(one)
    if any(call.get(name) is None for name in SIZES):
        return None
    options = [call.get("options", ""), call.get("option", "")]
    if window := call.get("window"):
        right = 0 if call.get("causal") else (window - 1) // 2
        options.append(f"window ({window - 1 - right}, {right})")
    said = ", ".join(x for x in options if x not in ("", "plain"))
    if call.get("Hkv") == call["H"]:
        del call["Hkv"]
    place = one.what if one.part in ("cpu", "generic", "loops", "ranks") else "GPU"
    return place, said, *(call.get(name) for name in (*SIZES, *OTHERS, "page"))


def _cache(one: Comparison) -> dict[str, Any]:
    """Return the axes of decoding with caches of equal lengths; none if they differ."""
    call = one.call
    if " to " in call["case"]:
        return {"N": None}
    keys, queries = call["keys"] // call["B"], call["Nq"]
    return {"pass": "forward", "N": queries, "Nk": keys, "causal": queries > 1 or None}


def contradictions(found: Iterable[Comparison]) -> Iterator[Contradiction]:
    """Yield the calls whose verdicts in two files contradict each other."""
    calls: dict[tuple[Any, ...], list[Comparison]] = {}
    for one in found:
        if (key := same_call(one)) is not None:
            calls.setdefault(key, []).append(one)
    for same in calls.values():
        for one, two in combinations(same, 2):
            for baseline in one.speeds:
                if one.file != two.file and baseline in two.speeds and _differ(one, two, baseline):
                    first, second = sorted((one, two), key=lambda x: -x.speeds[baseline])
                    files = first.file, second.file
                    speeds = first.speeds[baseline], second.speeds[baseline]
                    yield Contradiction(label(one.call), baseline, files, speeds)


def _differ(one: Comparison, two: Comparison, baseline: str) -> bool:
    (low, high), (least, most) = _range(one, baseline), _range(two, baseline)
    apart = high < least or most < low
    return apart and verdict(one, baseline) != verdict(two, baseline)


def main(argv: list[str] | None = None) -> int:
    """Print the contradictions; the exit status is 1 if a check finds any."""
    parser = argparse.ArgumentParser(prog="verdicts", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit status 1 if there are any")
    arguments = parser.parse_args(argv)
    found = list(contradictions(comparisons(read())))
    for one in found:
        print(one)
    print(f"{len(found)} contradictions")
    return int(bool(found) and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
