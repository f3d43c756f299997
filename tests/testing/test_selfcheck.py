"""The command that checks random problems: it finds what is wrong, and draws what it says."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

import tileattn
from tests import sanitize
from tests.backends.cupy import fake_cupy
from tileattn.backends import registry
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.call.parse import parse
from tileattn.cli.commands import main
from tileattn.dtypes import DTYPES
from tileattn.kernels.cuda.families.hopper import HOPPER
from tileattn.results import Attention, Gradients
from tileattn.testing import selfcheck
from tileattn.testing.options import DRAW, Choices
from tileattn.testing.selfcheck import Case, Family
from tileattn.testing.template import TemplateBackend

pytestmark = pytest.mark.usefixtures("one_blas_thread")


@pytest.mark.parametrize(
    ("backend", "problems"), [("numpy", 12), pytest.param("llvm", 4, marks=pytest.mark.slow)]
)
def test_right_results_pass(
    backend: str, problems: int, capsys: pytest.CaptureFixture[str]
) -> None:
    if (reason := tileattn.available_backends()[backend]) is not None:
        pytest.skip(reason)
    assert main(["check", "--problems", str(problems), "--seed", "7", "--backend", backend]) == 0
    assert f"{problems} problems on backend {backend!r} match" in capsys.readouterr().out


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
    assert main(["check", "--problems", "20", "--backend", "numpy"]) == 1
    assert "FAILED: " in capsys.readouterr().out


def test_a_backend_of_few_options_gets_problems_that_it_supports() -> None:
    drawn = islice(selfcheck.cases(np.random.default_rng(0), "template", 0), 100)
    problems = [parse(*case.call[:3], case.call.options)[0] for case in drawn]
    assert sum(TemplateBackend().why_not(problem) is None for problem in problems) > 10


def test_a_backend_that_cannot_run_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    reason = tileattn.available_backends()["cupy"]
    if reason is None:
        pytest.skip("CuPy can run here")
    assert main(["check", "--backend", "cupy"]) == 2
    assert reason in capsys.readouterr().err


def test_without_a_terminal_lines_tell_of_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tileattn.cli.progress.SECONDS", 0.0)
    assert main(["check", "--problems", "3", "--backend", "numpy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3", "3"]


def test_problems_are_of_every_kind_and_the_same_again() -> None:
    found, again = (
        list(islice(selfcheck.cases(np.random.default_rng(0), "numpy", 1), 300)) for _ in range(2)
    )
    assert list(map(str, found)) == list(map(str, again))
    assert all(
        np.array_equal(a.call.k, b.call.k, equal_nan=True)
        for a, b in zip(found, again, strict=True)
    )
    names = {*DRAW, "score_mod", "mask_mod", "aux"}
    assert set().union(*(case.call.options for case in found)) == names
    assert {case.call.q.dtype for case in found} == set(DTYPES)
    lengths = {case.call.q.shape[2] for case in found}
    assert {0, 1} < lengths
    assert any(case.call.q.shape[2] > case.call.k.shape[2] for case in found)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100"])
def test_the_kernels_that_are_compiled_are_those_that_problems_launch(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices, launched = Choices(np.random.default_rng(1)), set()
    with fake_cupy.machine(monkeypatch) as gpu:
        gpu.arch = arch
        for n in range(60):
            family = Family.draw(choices, 130)
            if n % 2:  # with any of these, a Hopper kernel never runs
                options = [x for x in family.options if x not in {"bias", "mask", "dropout_p"}]
                family = family._replace(options=tuple(options))
            case = Case.draw(choices, family, max_length=80, layouts=("plain",))
            gpu.launches.clear()
            launch(case, gpu)
            keys = {key for key, *_ in gpu.launches}
            assert keys == set(selfcheck.kernels(case, gpu.device_of(0)))
            launched |= keys
    assert len(launched) > 50
    assert any(key.kernel == HOPPER for key in launched) == (arch == "sm_90a")


def launch(case: Case, gpu: fake_cupy.Machine) -> None:
    """Run both passes on copies of the arrays."""

    q, k, v, dout, dlse = (x if x is None else gpu.upload(x, blocking=True) for x in case.call[:-1])
    options = case.call.options.copy()
    for name in options.keys() & {"bias", "mask", "alibi_slopes", "sinks", "tree_mask"}:
        options[name] = gpu.upload(options[name], blocking=True)
    if "aux" in options:
        options["aux"] = tuple(gpu.upload(x, blocking=True) for x in options["aux"])
    problem, operands = parse(q, k, v, options)
    engine: Any = registry.get("cupy")
    attention = engine.forward(problem, operands, None)
    engine.backward(problem, operands, dout, attention, dlse, case.deterministic)


def test_the_script_for_the_sanitizer_reaches_every_option_and_dtype() -> None:
    calls = list(sanitize.calls(np.random.default_rng(0)))
    assert len(calls) >= 25
    used = set().union(*(options for *_, options in calls))
    others = {"score_mod", "mask_mod", "aux", "cu_seqlens_q", "cu_seqlens_k"}
    assert used == set(DRAW) - {"scale", "invariant"} | others
    assert "invariant" in sanitize.JOBS
    assert {np.dtype(dtype) for dtype, *_ in calls} == set(DTYPES)
