"""The command that checks random problems: it finds what is wrong, and draws what it says."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

import tileattn
from tests import sanitize
from tileattn import selfcheck
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.cli import main
from tileattn.kernels.config.hopper import HOPPER
from tileattn.kernels.config.key import KernelKey
from tileattn.kernels.config.tiles import candidates
from tileattn.kernels.launch.device import Device, device_of_arch
from tileattn.kernels.launch.layout import CallLayout, array_layout
from tileattn.kernels.launch.plan import plans_of
from tileattn.problem import parse
from tileattn.results import Attention, Gradients
from tileattn.selfcheck import Case, Family

pytestmark = pytest.mark.usefixtures("one_blas_thread")


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
def test_the_kernels_of_a_family_are_those_that_its_problems_launch(arch: str) -> None:
    rng, device = np.random.default_rng(1), device_of_arch(arch)
    launched, of_hopper = 0, set()
    for n in range(120 if arch == "sm_90a" else 40):
        family = Family.draw(rng, widest=130)
        if n % 2:  # with any of these, a Hopper kernel never runs
            options = [x for x in family.options if x not in {"bias", "mask", "dropout_p"}]
            family = family._replace(options=tuple(options))
        keys = key_range(Case.draw(rng, family), device)
        assert keys <= set(family.keys(arch))
        launched += len(keys)
        of_hopper |= {key.tile for key in keys if key.kernel == HOPPER}
    assert launched > 100
    rows = candidates(HOPPER, 2, 64) if arch == "sm_90a" else ()
    assert of_hopper >= {row[:2] for row in rows}


def key_range(case: Case, device: Device) -> set[KernelKey]:
    """List the kernels of both passes, of arrays that lie on the device as they do on the host."""
    q, k, v, _ = case.arrays
    problem, x = parse(q, k, v, case.options)
    arrays = {"q": x.q, "k": x.k, "v": x.v, "bias": x.bias, "mask": x.mask}
    arrays |= {"alibi_slopes": x.alibi_slopes, "sinks": x.sinks}
    layout = CallLayout(
        tuple((name, array_layout(a, 0)) for name, a in arrays.items() if a is not None),
        tuple(x.kv_lengths.tolist()),
        tuple(x.q_offset.tolist()),
        x.block_mask,
    )
    forward, *backward = plans_of(problem, layout, device)
    plans = forward, backward[case.deterministic]
    return {launch.key for plan in plans for launch in plan.launches}


def test_the_script_for_the_sanitizer_reaches_every_option_and_dtype() -> None:
    calls = list(sanitize.calls(np.random.default_rng(0)))
    assert len(calls) >= 25
    used = set().union(*(options for *_, options in calls))
    assert used == set(selfcheck.DRAWS) - {"scale"}
    assert {np.dtype(dtype) for dtype, *_ in calls} == set(selfcheck.DTYPES)
