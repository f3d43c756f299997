"""Every comparison of tileattn with another library, or another way, in the results files."""

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from benchmarks import cpu, roofline
from benchmarks.report import Row

NAMES = {
    **cpu.TITLES,
    "PyTorch cuDNN": "PyTorch's cuDNN",
    "PyTorch flash": "PyTorch's FlashAttention-2",
    "SDPA": "PyTorch",
    "SDPA, cuDNN": "PyTorch's cuDNN",
    "SDPA, efficient": "PyTorch memory-efficient",
    "SDPA, flash": "PyTorch's FlashAttention-2",
    "batch": "the same calls as a batch",
    "cudnn": "cuDNN",
    "cupy": "naive CuPy",
    "efficient": "PyTorch memory-efficient",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "flash": "FlashAttention-2",
    "flashinfer": "FlashInfer",
    "flashinfer_cuda_cores": "FlashInfer on CUDA cores",
    "flashmla": "FlashMLA",
    "flex": "FlexAttention",
    "math": "PyTorch unfused",
    "no mask": "the call without a mask",
    "numpy": "`numpy`",
    "sdpa": "PyTorch",
    "varlen": "PyTorch varlen",
    "varlen_attn": "PyTorch varlen",
}
"""Names of implementations, where the pages have others than the results files."""


class Comparison(NamedTuple):
    """A call, and the speed of tileattn in it relative to each baseline."""

    file: str
    part: str  # of the page
    what: str  # was measured: a title
    call: Row  # its axes
    speeds: dict[str, float]  # by baseline; above 1 tileattn is faster
    us: dict[str, float]  # where known, by implementation; of tileattn under "ours"
    spread: dict[str, float]  # interquartile ranges over medians, where known
    where: str  # the machine: a GPU, or a processor and its threads

    @property
    def fastest(self) -> str:
        return min(self.speeds, key=self.speeds.__getitem__)

    @property
    def speed(self) -> float:
        """Return the speed relative to the fastest baseline."""
        return self.speeds[self.fastest]

    @property
    def is_slower(self) -> bool:
        """True if two digits show the speed as less than 1."""
        return self.speed < 0.995

    @property
    def is_certain(self) -> bool:
        """True if no time spreads so far that the speedup means little."""
        return max(self.spread.values(), default=0.0) <= WIDE

    def uncertainty(self, baseline: str) -> float:
        """Return the larger spread of both times, at least 1 %: twins in one run differ by that."""
        return max(LEAST_SPREAD, *(self.spread.get(x, 0.0) for x in ("ours", baseline)))


LEAST_SPREAD = 0.01
WIDE = 0.1  # an interquartile range over a median, from which a speedup is uncertain

AXES = (
    *("pass", "loop", "model", "case", "option", "function", "lengths", "schedule", "layout"),
    *("section", "dropout", "tokens", "threads", "dtype", "B", "H", "Hq", "Hkv", "N", "Nq", "Nk"),
    *("D", "Dv", "causal", "window", "options", "page", "keys", "density"),
)
SECTIONS = {
    "block": "a block of a transformer",
    "decoding": "one query",
    "generation": "a generated token",
    "host": "CPU time of a call of 16 tokens",
    "passes": "attention, both passes",
    "training": "a step of training",
}
"""Names of sections, where they say more than the sizes do."""


def axes_of(row: Row) -> Row:
    """Return the axes of a row, without what goes without saying."""
    found = {name: row[name] for name in AXES if row.get(name) not in (None, "", False)}
    found["section"] = SECTIONS.get(found.get("section", ""))
    if found.get("Hkv") == found.get("H"):
        found.pop("Hkv", None)
    for name, other in (("Nk", "N"), ("Dv", "D")):
        if found.get(name) == found.get(other):
            found.pop(name, None)
    return {name: value for name, value in found.items() if value is not None}


def label(call: Row) -> str:
    """Name a call by its axes."""
    named = {"density", "dropout", "page", "threads", "tokens", "window"}
    said = []
    for name, x in call.items():
        if name == "causal":
            said.append(name)
        elif name != "keys":
            said.append(f"{name} = {x}" if name[0].isupper() else f"{name} {x}" * (name in named))
            said[-1] = said[-1] or str(x)
    return ", ".join(said)


# --- readers --------------------------------------------------------------------------------------


class Source(NamedTuple):
    """Results files that compare: the part of the page, their title, and how they are read."""

    part: str
    title: str
    read: Callable[["Source", str, Row], Iterator[Comparison]]
    only: tuple[str, ...] = ()  # baselines that count, if not all do

    def made(
        self, file: str, result: Row, row: Row, speeds: Mapping[str, float], **known: Any
    ) -> Iterator[Comparison]:
        """Yield a comparison with these speeds, if there are any."""
        speeds = {n: x for n, x in speeds.items() if not self.only or n in self.only}
        if speeds:
            given: Row = {"part": self.part, "what": self.title, "us": {}, "spread": {}} | known
            call, where = axes_of(row), machine_of(result)
            yield Comparison(file=file, call=call, speeds=speeds, where=where, **given)


def machine_of(result: Row) -> str:
    """Name the GPU, or the processor and the number of threads."""
    machine = result["machine"]
    if "gpu" in machine:
        return str(machine["gpu"])
    threads = machine["threads"]
    return f"{machine['processor']}, {threads} thread{'s' * (threads > 1)}"


def _short(result: Row) -> str:
    """Name the machine in a title: H100, or Intel Xeon, 16 threads."""
    return _LONG.sub("", machine_of(result))


_LONG = re.compile(r"^NVIDIA | \d+GB.*|\(R\)| Processor|, \d+ cores?")


def _ours(values: Mapping[str, float], name: str = "tileattn") -> dict[str, float]:
    return {"ours" if x == name else x: value for x, value in values.items()}


def _speedups(source: Source, file: str, result: Row) -> Iterator[Comparison]:
    """Read rows with speedups by baseline."""
    for row in result["rows"]:
        us = row.get("us")
        if us is None:
            flops = roofline.configuration_of(row).flops
            us = {name: flops / x / 1e6 for name, x in row["tflops"].items() if x}
        known = {"us": _ours(us), "spread": _ours(row["spread"])}
        yield from source.made(file, result, row, row["speedup_over"], **known)


def _participants(
    source: Source, file: str, result: Row, fields: Mapping[str, float], ours: tuple[str, ...]
) -> Iterator[Comparison]:
    """Read rows with times by participant, in fields with a unit each: microseconds.

    Each way to call tileattn is compared with all other libraries; the page sums up the first.
    """
    for row in result["rows"]:
        for field, unit in fields.items():
            times = row.get(field) or {}
            others = {name: x for name, x in times.items() if name not in OURS}
            for name in ours:
                if name in times:
                    speeds = {x: time / times[name] for x, time in others.items()}
                    us = {x: unit * time for x, time in {"ours": times[name], **others}.items()}
                    what = source.title.format(
                        **{"way": WAYS.get(name, f"`{name}`"), "field": FIELDS.get(field, "")},
                        **{"section": SECTIONS.get(row["section"]), "on": _short(result)},
                        dtype=row.get("dtype"),
                    )
                    part = source.part if name == ours[0] else "others"
                    known = {"what": what, "us": us, "part": part}
                    yield from source.made(file, result, row, speeds, **known)


WAYS = {"torch": "`tileattn.torch`", "arrays": "arrays"}
FIELDS = {"host_us": ": CPU time of a call", "both_s": ": both passes, after the forward pass"}
OURS = ("tileattn", "torch", "arrays", "llvm", "numpy")


def _cpu(source: Source, file: str, result: Row) -> Iterator[Comparison]:
    """Read rates and times on a CPU: each backend beside the other libraries, llvm beside numpy."""
    for row in result["rows"]:
        rates = row.get("gflops") or row.get("gbytes_per_second")
        unit = None
        if isinstance(rates, dict):
            times = {name: 1 / x for name, x in rates.items() if name != "copy"}
            unit = roofline.configuration_of(row).flops / 1e3 if "gflops" in row else None
        else:
            times, unit = row.get("us", {}), 1.0
        for name in ("llvm", "numpy"):
            others = {x: time for x, time in times.items() if x not in ("llvm", name)}
            if name in times:
                speeds = {x: time / times[name] for x, time in others.items()}
                us = {x: unit * time for x, time in _ours(times, name).items()} if unit else {}
                what = source.title.format(name=name, on=_short(result))
                yield from source.made(file, result, row, speeds, what=what, us=us)


def _launches(source: Source, file: str, result: Row) -> Iterator[Comparison]:
    """Read rows of an implementation each."""
    calls: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        if "launch_overhead_us" in row:
            calls.setdefault(row["pass"], {})[row["implementation"]] = row
    for rows in calls.values():
        us = {name: row["launch_overhead_us"] for name, row in rows.items()}
        others = us.keys() - {"tileattn", "new output", "deterministic"}
        speeds = {name: us[name] / us["tileattn"] for name in us if name in others}
        yield from source.made(file, result, rows["tileattn"], speeds, us=_ours(us))


def _masks(source: Source, file: str, result: Row) -> Iterator[Comparison]:
    """Read calls with a mask, beside the call without one."""
    for row in result["rows"]:
        if "speedup" in row and row["case"] != "full":
            us = {"ours": 1e3 * row["ms"], "no mask": 1e3 * row["ms"] * row["speedup"]}
            yield from source.made(file, result, row, {"no mask": row["speedup"]}, us=us)


def _nested(source: Source, file: str, result: Row, others: Mapping[str, str]) -> Iterator[Any]:
    """Read rows with a record for each implementation."""
    for row in result["rows"]:
        ours = row.get("tileattn", row).get("ms")
        ms = {who: row.get(name, {}).get("ms") for name, who in others.items()}
        speeds = {name: x / ours for name, x in ms.items() if ours and x}
        us = {"ours": ours} | ms
        known = {name: 1e3 * x for name, x in us.items() if x}
        yield from source.made(file, result, row, speeds, us=known)


def _ranks(source: Source, file: str, result: Row) -> Iterator[Comparison]:
    """Read calls of several ranks, beside one rank."""
    for row in result["rows"]:
        one, name = row.get("one_rank_ms"), "one rank"
        if one is None:
            one, name = row.get("one_gpu_ms"), "one GPU"
        if one and row.get("ms"):
            us = {"ours": 1e3 * row["ms"], name: 1e3 * one}
            yield from source.made(file, result, row, {name: one / row["ms"]}, us=us)


def _by_participant(fields: Mapping[str, float], *ours: str) -> Callable[..., Any]:
    return partial(_participants, fields=fields, ours=ours)


_LOOPS = _by_participant({"us": 1.0, "host_us": 1.0}, "torch", "arrays", "llvm", "numpy")
_FIRST = _by_participant({"forward_s": 1e6, "both_s": 1e6}, "torch", "arrays", "llvm", "numpy")
_IN_PYTORCH = _by_participant({"us": 1.0, "ms": 1e3}, "tileattn")
_NAIVE = {"pytorch": "math", "naive": "cupy"}

SOURCES = {
    "gpu_forward_bf16": Source("grid", "Forward, bf16", _speedups),
    "gpu_backward_bf16": Source("grid", "Backward, bf16", _speedups),
    "gpu_forward_fp16": Source("grid", "Forward, fp16", _speedups),
    "gpu_backward_fp16": Source("grid", "Backward, fp16", _speedups),
    "gpu_shapes": Source("grid", "Forward, bf16, other shapes", _speedups),
    "gpu_backward_shapes": Source("grid", "Backward, bf16, other shapes", _speedups),
    "gpu_models": Source("models", "Models", _speedups),
    "gpu_models_f32": Source("models", "Models, float32", _speedups),
    "gpu_decode": Source("decode", "Decoding", _speedups),
    "gpu_packed": Source("packed", "Packed sequences", _speedups),
    "gpu_options": Source("options", "Options", _speedups),
    "gpu_functions": Source("options", "Functions of scores and masks", _speedups),
    "gpu_sparse": Source("options", "Masks, beside the call without one", _masks),
    "traffic_density": Source(
        "options", "Block masks by density", partial(_nested, others={"flex": "flex"})
    ),
    "lived_*": Source("loops", "Loops{field}, {way}, {on}", _LOOPS),
    "end_to_end_*": Source("loops", "Whole models: {section}, {dtype}, {on}", _IN_PYTORCH),
    "first_calls_*": Source("loops", "First calls{field}, {way}, {on}", _FIRST),
    "frameworks_*": Source("loops", "Inside PyTorch: {section}, {on}", _IN_PYTORCH),
    "gpu_host": Source("loops", "CPU time of a launch", _launches),
    "gpu_f32": Source("precision", "Float32", _speedups),
    "gpu_f64": Source("precision", "Float64", _speedups),
    "gpu_bf16": Source("generic", "Generic kernels, bf16", _speedups, ("flash",)),
    "gpu_fp16": Source("generic", "Generic kernels, fp16", _speedups, ("flash",)),
    "traffic": Source("others", "Standard attention", partial(_nested, others=_NAIVE)),
    "cpu_*": Source("cpu", "`{name}`, {on}", _cpu),
    "distributed_cpu": Source("ranks", "Ranks that share a sequence", _ranks),
    "distributed_gpu": Source("ranks", "GPUs that share a sequence", _ranks),
}
"""Results files with comparisons, by name, in the order of the page."""

WITHOUT = {
    "endurance_*": "times of many calls of tileattn, early and late",
    "gpu_ceilings": "rates of matmuls and copies",
    "gpu_invariant": "tileattn with and without `invariant`",
    "memory_*": "bytes, not times",
    "nonfinite": "tileattn with and without NaN",
    "stress_gpu*": "whether repeated calls have the same bits",
    "traffic_blocks_*": "tiles of tileattn",
    "tuning_*": "a constant of tileattn, and another value of it",
    "waits_*": "whether tileattn waits for a busy GPU",
}
"""Results files without comparisons: what they hold instead."""


def source_of(file: str) -> Source | None:
    """Return how a results file is read; None if it has no comparisons."""
    return next((x for pattern, x in SOURCES.items() if fnmatchcase(file, pattern)), None)


def comparisons(results: Mapping[str, Row]) -> Iterator[Comparison]:
    """Yield all comparisons, in the order of the page."""
    for pattern, source in SOURCES.items():
        for file, result in results.items():
            if fnmatchcase(file, pattern):
                yield from source.read(source, file, result)
