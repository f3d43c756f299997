"""The output of ncu is read right: units, separators, many kernels, and errors."""

import pytest

from benchmarks.configurations import Configuration
from benchmarks.counters import kernels, summed
from benchmarks.memory import Case

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
