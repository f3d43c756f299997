"""Warnings of the project's own code fail a test; those of a plugin that a user has do not."""

import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tileattn

ROOT = Path(__file__).parents[1]
RAISES: dict[str, str] = {
    "a warning": "warnings.warn('beware', UserWarning)",
    "a ufunc": "np.float32(1) / np.zeros(1, np.float32)",
    "a function of NumPy": "np.mean(np.zeros(0))",
}


def run_in(module: str, code: str) -> None:
    """Run code as a line of a module."""
    exec(code, {"__name__": module, "warnings": warnings, "np": np})


@pytest.mark.parametrize("code", RAISES.values(), ids=RAISES.keys())
@pytest.mark.parametrize(
    "module", ["tileattn.algorithm.mask", "tests.algorithm.test_softmax", "benchmarks.cpu"]
)
def test_a_warning_of_the_project_is_an_error(module: str, code: str) -> None:
    with pytest.raises(Warning, match=r"beware|divide|empty"):
        run_in(module, code)


def test_numpy_that_warns_within_a_call_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(*_: Any, **__: Any) -> None:
        np.zeros(0).mean()

    monkeypatch.setattr("tileattn.algorithm.spec.finalize", warns)
    x = np.ones((3, 2))
    with pytest.raises(RuntimeWarning, match="empty"):
        tileattn.forward(x, x, x, backend="numpy")


@pytest.mark.parametrize("module", ["pytest_benchmark.logger", "numpydoc.hooks", "toolsets"])
def test_a_warning_of_others_is_none(module: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        run_in(module, RAISES["a warning"])
    assert [str(warning.message) for warning in said] == ["beware"]


def test_a_plugin_may_warn_and_a_thread_may_not_fail(tmp_path: Path) -> None:
    """As pytest-benchmark warns beside pytest-xdist, before the first test."""
    (tmp_path / "plugin.py").write_text(
        "import warnings\ndef pytest_configure(config): warnings.warn('disabled beside xdist')\n"
    )
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
            import threading

            def test_right():
                pass

            def test_thread():
                thread = threading.Thread(target=lambda: 1 / 0)
                thread.start()
                thread.join()
            """)
    )
    options = ["-p", "plugin", "-p", "no:cacheprovider", "--rootdir", ".", "test_it.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_it.py::test_thread - pytest.PytestUnhandledThread" in done.stdout
