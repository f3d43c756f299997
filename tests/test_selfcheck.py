"""The command that checks random problems: it finds what is wrong, and draws what it says."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

import tileattn
from tests import fake_cupy, sanitize
from tests.fake_cupy import Machine
from tileattn import selfcheck
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.cli import main
from tileattn.kernels.config.hopper import HOPPER
from tileattn.kernels.config.tiles import candidates
from tileattn.results import Attention, Gradients
from tileattn.selfcheck import Case, Family

pytestmark = pytest.mark.usefixtures("one_blas_thread")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with fake_cupy.machine(monkeypatch) as made:
        yield made


def test_right_results_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--problems", "20", "--seed", "7"]) == 0
    assert "all 20 problems agree" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_a_wrong_result_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = "forward" if name in Attention._fields else "backward"
    true = getattr(NumpyBackend, step)

    def wrong(*given: Any) -> Attention | Gradients:
        results: Attention | Gradients = true(*given)
        return results._replace(**{name: getattr(results, name) * 1.5})

    monkeypatch.setattr(NumpyBackend, step, wrong)
    assert main(["check", "--problems", "20"]) == 1
    assert "FAILED after" in capsys.readouterr().out


def test_a_backend_that_cannot_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    reason = tileattn.available_backends()["cupy"]
    if reason is None:
        pytest.skip("CuPy can run here")
    assert main(["check", "--backend", "cupy"]) == 2
    assert reason in capsys.readouterr().err


def test_without_a_terminal_lines_tell_of_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tileattn.cli.PROGRESS_SECONDS", 0.0)
    assert main(["check", "--problems", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "all"]


def test_problems_are_of_every_kind() -> None:
    rng = np.random.default_rng(0)
    found = list(islice(selfcheck.cases(rng, "numpy", 1), 300))
    options = set().union(*(case.options for case in found))
    assert options == set(selfcheck.DRAWS)
    assert {case.arrays[0].dtype for case in found} == set(selfcheck.DTYPES)
    lengths = {case.arrays[0].shape[2] for case in found}
    assert {0, 1} < lengths
    assert any(case.arrays[0].shape[2] > case.arrays[1].shape[2] for case in found)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100"])
def test_the_kernels_of_a_family_are_those_that_its_problems_start(gpu: Machine, arch: str) -> None:
    gpu.arch = arch
    rng = np.random.default_rng(1)
    started, of_hopper = 0, set()
    for _ in range(120 if arch == "sm_90a" else 40):
        family = Family.draw(rng, widest=130)
        # Casts and copies of lengths are kernels of CuPy's own, of which this machine has none.
        without = {"kv_lengths", "q_offset", "alibi_slopes", "sinks", "block_mask"}
        family = family._replace(options=tuple(n for n in family.options if n not in without))
        case = Case.draw(rng, family)
        gpu.launches.clear()
        run_on(gpu, case)
        assert {key for key, *_ in gpu.launches} <= set(family.keys(arch))
        started += len(gpu.launches)
        keys = [key for key, *_ in gpu.launches if key.kernel == HOPPER]
        of_hopper |= {(key.block_q, key.block_k) for key in keys}
    assert started > 100
    rows = candidates(HOPPER, 2, 64) if arch == "sm_90a" else ()
    assert of_hopper >= {row[:2] for row in rows}


def run_on(gpu: Machine, case: Case) -> None:
    """Start a problem on arrays that hold anything."""
    q, k, v, dout = (gpu.array(x.shape, x.dtype) for x in case.arrays)
    options = {
        name: gpu.array(x.shape, x.dtype) if isinstance(x, np.ndarray) else x
        for name, x in case.options.items()
    }
    attention = tileattn.forward(q, k, v, **options)
    tileattn.backward(dout, q, k, v, *attention, deterministic=case.deterministic, **options)


def test_the_script_for_the_sanitizer_reaches_every_option_and_dtype() -> None:
    calls = list(sanitize.calls(np.random.default_rng(0)))
    assert len(calls) >= 25
    used = set().union(*(options for *_, options in calls))
    assert used == set(selfcheck.DRAWS) - {"scale"}
    assert {np.dtype(dtype) for dtype, *_ in calls} == set(selfcheck.DTYPES)
