"""What ncu writes is read right: units, separators, many kernels, and what goes wrong."""

import json
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import counters, device
from benchmarks.configurations import Configuration
from benchmarks.counters import METRICS, kernels, summed
from benchmarks.memory import Case
from tests.benchmarks.fake_gpu import Fake

ONE = Configuration("both", "fp16", 64, 16, 1024, 64)
CASE = Case("gpu", "tileattn", ONE, ("forward", 16, 64, 1))

# As ncu 2024 and later write it: its own lines first, units in a row of their own.
SAMPLE = """\
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "flash_forward" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",\
"Grid Size","Device","CC","dram__bytes_read.sum","dram__bytes_write.sum",\
"gpu__time_duration.sum","lts__t_bytes.sum"
"","","","","","","","","","","","Mbyte","Kbyte","us","Gbyte"
"0","4711","python3.12","127.0.0.1","void forward<float, (int)64>(Params)","1","7",\
"(384, 1, 1)","(132, 1, 1)","0","9.0","402.65","135,266.30","1,234.50","1.5"
"1","4711","python3.12","127.0.0.1","delta(Params)","1","7",\
"(128, 1, 1)","(4096, 1, 1)","0","9.0","0.35","4.7","65.5","0.25"
"""


def test_bytes_and_times_of_all_kernels_are_added() -> None:
    first, second = kernels(SAMPLE)
    assert first == {
        "dram__bytes_read.sum": pytest.approx(402.65e6),
        "dram__bytes_write.sum": pytest.approx(135266.3e3),
        "lts__t_bytes.sum": pytest.approx(1.5e9),
        "gpu__time_duration.sum": pytest.approx(1234.5e-6),
    }
    assert second["dram__bytes_read.sum"] == pytest.approx(0.35e6)
    assert summed(SAMPLE) == {
        "dram_read_bytes": 403_000_000,
        "dram_write_bytes": 135_271_000,
        "l2_bytes": 1_750_000_000,
        "kernels_ms": pytest.approx(1.3),
        "kernels": 2,
    }


@pytest.mark.parametrize(
    ("old", "new", "name", "value"),
    [
        ("Mbyte", "byte", "dram_read_bytes", 403),
        ("Mbyte", "Tbyte", "dram_read_bytes", 403e12),
        ("us", "nsecond", "kernels_ms", 1.3e-3),
        ("us", "second", "kernels_ms", 1.3e6),
    ],
)
def test_units_are_known(old: str, new: str, name: str, value: float) -> None:
    assert summed(SAMPLE.replace(f'"{old}"', f'"{new}"'))[name] == pytest.approx(value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("Mbyte", "sector", "dram__bytes_read.sum has the unit 'sector'; expected one of byte"),
        ("402.65", "n/a", "dram__bytes_read.sum is 'n/a'; expected a number"),
        ("lts__t_bytes.sum", "lts__t_sectors.sum", "ncu wrote no lts__t_bytes.sum; got columns"),
    ],
)
def test_what_cannot_be_read_is_refused(old: str, new: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        summed(SAMPLE.replace(old, new))


def test_a_table_without_kernels_is_refused() -> None:
    head = "".join(SAMPLE.splitlines(keepends=True)[:5])
    with pytest.raises(ValueError, match="ncu wrote of no kernel"):
        summed(head)


# --- ncu itself, played by a script -------------------------------------------------------------


def played(folder: Path, body: str) -> None:
    """Put a script named ncu into a folder; it finds the log file in its arguments."""
    script = folder / "ncu"
    script.write_text(f"#!{sys.executable}\nimport sys\ngiven = sys.argv[1:]\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_the_child_is_profiled_and_its_counts_are_read(on_path: Path) -> None:
    (on_path / "sample").write_text(SAMPLE, encoding="utf-8")
    played(
        on_path,
        "import json\n"
        f"open({str(on_path / 'given')!r}, 'w').write(json.dumps(given))\n"
        "log = given[given.index('--log-file') + 1]\n"
        f"open(log, 'w').write(open({str(on_path / 'sample')!r}).read())",
    )
    assert counters.unavailable() is None
    assert counters.measure(CASE)["kernels"] == 2
    given = json.loads((on_path / "given").read_text(encoding="utf-8"))
    assert given[given.index("--metrics") + 1] == ",".join(METRICS)
    assert given[given.index("--profile-from-start") + 1] == "off"
    assert given[-4:-1] == ["-m", "benchmarks.counters", "--child"]
    assert Case.read(given[-1]) == CASE


def test_what_ncu_complains_of_is_said(on_path: Path) -> None:
    played(on_path, "print('==ERROR== ERR_NVGPUCTRPERM - no permission'); sys.exit(1)")
    with pytest.raises(RuntimeError, match="ended with status 1: ERR_NVGPUCTRPERM"):
        counters.measure(CASE)


def test_the_passes_run_once_inside_the_profiled_range(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fake = Fake()
    wait = SimpleNamespace(synchronize=lambda: events.append("wait"))
    fake.xp = SimpleNamespace(
        float32=np.float32, random=np.random, cuda=SimpleNamespace(Device=lambda: wait)
    )
    monkeypatch.setattr(device, "Gpu", lambda: fake)
    monkeypatch.setattr(Case, "prepared", lambda *_: lambda: events.append("run"))
    profiler = SimpleNamespace(
        start=lambda: events.append("start"), stop=lambda: events.append("stop")
    )
    for name in ("cupy", "cupy.cuda"):  # neither needs to be there
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(profiler=profiler))
    counters.child(replace(CASE, configuration=replace(ONE, N=16, B=1)))
    assert events == ["run", "wait", "start", "run", "wait", "stop"]
