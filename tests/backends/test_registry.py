"""Which backend a call gets, and what is said when it gets none."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tileattn
from tileattn import BackendUnavailableError, UnsupportedError
from tileattn.backends.cupy.backend import CupyBackend
from tileattn.backends.llvm.backend import LlvmBackend
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.call.problem import Problem
from tileattn.validation import UNMASKED

Q = np.ones((2, 4, 7, 3), np.float32)
K = np.ones((2, 2, 5, 3), np.float32)


class FakeArray:
    """The attributes of a CuPy array that tileattn may read before it knows that CuPy works."""

    dtype = Q.dtype
    shape = Q.shape
    strides = Q.strides
    ndim = Q.ndim


FakeArray.__module__ = "cupy"
FakeArray.__name__ = FakeArray.__qualname__ = "ndarray"


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeArray:
    """Make an array of a CuPy that has been imported."""
    module = ModuleType("cupy")
    module.ndarray = FakeArray  # type: ignore[attr-defined]  # a module made up here
    monkeypatch.setitem(sys.modules, "cupy", module)
    return FakeArray()


def refused(error: type[Exception], message: str, *arrays: Any, **options: Any) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        tileattn.forward(*arrays, **options)


# --- arrays of several libraries ----------------------------------------------------------------


OPTIONS = {
    "out": "",
    "bias": " that broadcasts to (B, Hq, Nq, Nk)",
    "mask": " that broadcasts to (B, Hq, Nq, Nk)",
    "alibi_slopes": " of shape (B, Hq) or (Hq,)",
    "sinks": " of shape (Hq,)",
}


def test_arrays_are_of_one_library_and_never_converted(cupy: FakeArray) -> None:
    q, k = (f"of dtype {x.dtype} and shape {x.shape}" for x in (Q, K))
    to_numpy = "must be a NumPy array{}; got cupy.ndarray " + q + " (cupy.asnumpy({}) makes one)"
    to_cupy = "must be a CuPy array; got numpy.ndarray {} (cupy.asarray({}) makes one)"
    refused(TypeError, f"k {to_numpy.format('', 'k')}", Q, cupy, K)
    refused(TypeError, f"v {to_numpy.format('', 'v')}", Q, K, cupy)
    refused(TypeError, f"k {to_cupy.format(k, 'k')}", cupy, K, K)
    refused(TypeError, f"q {to_cupy.format(q, 'q')}", Q, K, K, backend="cupy")
    refused(TypeError, f"q {to_numpy.format('', 'q')}", cupy, cupy, cupy, backend="numpy")
    for name, shape in OPTIONS.items():
        refused(TypeError, f"{name} {to_numpy.format(shape, name)}", Q, K, K, **{name: cupy})


def test_arguments_of_backward_are_of_the_library_of_q(cupy: FakeArray) -> None:
    out, lse = tileattn.forward(Q, K, K)
    for name in ("dout", "out", "lse", "dlse"):
        given: dict[str, Any] = {"dout": out, "out": out, "lse": lse, name: cupy}
        with pytest.raises(TypeError, match=rf"^{name} must be a NumPy array; got cupy"):
            tileattn.backward(q=Q, k=K, v=K, **given)


def test_an_array_whose_library_was_never_imported_is_nobodys() -> None:
    found = f"cupy.ndarray of dtype {Q.dtype} and shape {Q.shape} (cupy.asnumpy(q) makes one)"
    refused(TypeError, f"q must be a NumPy or CuPy array; got {found}", FakeArray(), K, K)


@pytest.mark.parametrize(
    ("q", "found", "remedy"),
    [
        ([[1.0]], "[[1.0]]", "numpy.asarray({}) makes one"),
        (np.float32(1), "np.float32(1.0)", "numpy.asarray({}) makes one"),
        (np.ma.array(Q), "numpy.ma.MaskedArray", UNMASKED),
        (Q[0, 0].view(np.matrix), "numpy.matrix", "numpy.asarray({}) makes one"),
    ],
)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_what_is_no_array_of_any_backend(q: Any, found: str, remedy: str) -> None:
    if hasattr(q, "mask") or isinstance(q, np.matrix):
        found += f" of dtype {q.dtype} and shape {q.shape}"
    message = f"q must be a NumPy or CuPy array; got {found} ({remedy.format('q')})"
    refused(TypeError, message, q, K, K)
    shape = OPTIONS["bias"]
    message = f"bias must be a NumPy array{shape}; got {found} ({remedy.format('bias')})"
    refused(TypeError, message, Q, K, K, bias=q)


def test_one_number_for_all_heads_is_told_how_to_be_an_array() -> None:
    remedy = "numpy.full(Hq, 0.5) has it for every head"
    message = f"alibi_slopes must be a NumPy array of shape (B, Hq) or (Hq,); got 0.5 ({remedy})"
    refused(TypeError, message, Q, K, K, alibi_slopes=0.5)


def test_subclasses_that_behave_as_arrays_are_taken(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=Q.shape)
    mapped[...] = Q
    np.testing.assert_array_equal(tileattn.forward(mapped, K, K).out, tileattn.forward(Q, K, K).out)


# --- which of those that own the arrays ---------------------------------------------------------


def test_numpy_arrays_run_on_compiled_kernels_where_there_is_llvmlite() -> None:
    if reason := tileattn.available_backends()["llvm"]:
        pytest.skip(reason)
    found = tileattn.explain(Q, K, K)
    assert found.backend == "llvm"
    assert found.reasons[0] == "q, k and v are NumPy arrays, and llvmlite is installed"
    np.testing.assert_array_equal(
        tileattn.forward(Q, K, K).out, tileattn.forward(Q, K, K, backend="llvm").out
    )


@pytest.mark.parametrize("backend", ["llvm", "numpy"])
def test_an_explanation_says_who_asked(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := tileattn.available_backends()[backend]:
        pytest.skip(reason)
    found = tileattn.explain(Q, K, K, backend=backend)
    assert (found.backend, found.reasons[0]) == (backend, f"backend={backend!r} asks for it")
    monkeypatch.setenv("TILEATTN_BACKEND", backend)
    found = tileattn.explain(Q, K, K)
    assert found.reasons[0] == f"TILEATTN_BACKEND={backend!r} asks for it"
    assert f"because   {found.reasons[0]}" in str(found).splitlines()


def test_the_next_backend_runs_what_the_preferred_one_does_not_support(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LlvmBackend, "unavailable", lambda _: None)
    monkeypatch.setattr(LlvmBackend, "why_not", lambda *_: "today is Sunday")
    found = tileattn.explain(Q, K, K)
    assert found.backend == "numpy"
    assert found.reasons[0] == "backend 'llvm' does not support this: today is Sunday"
    np.testing.assert_array_equal(
        tileattn.forward(Q, K, K).out, tileattn.forward(Q, K, K, backend="numpy").out
    )
    message = "backend 'llvm' does not support this: today is Sunday; use backend='numpy'"
    refused(UnsupportedError, message, Q, K, K, backend="llvm")


WITHOUT_LLVMLITE = """
import sys
sys.modules["llvmlite"] = None
import numpy as np
import tileattn

x = np.random.default_rng(0).standard_normal((2, 50, 8))
report = tileattn.explain(x, x, x)
print(report.backend, report.reasons[0], sep="\\n")
ours, theirs = tileattn.forward(x, x, x), tileattn.forward(x, x, x, backend="numpy")
print(np.array_equal(ours.out, theirs.out))
try:
    tileattn.forward(x, x, x, backend="llvm")
except tileattn.BackendUnavailableError as error:
    print(error)
"""


def test_without_llvmlite_numpy_runs_and_says_why() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TILEATTN_BACKEND"}
    command = [sys.executable, "-c", WITHOUT_LLVMLITE]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    reason = "backend 'llvm' cannot run here: llvmlite is not installed: pip install llvmlite"
    assert done.stdout.splitlines() == ["numpy", reason, "True", reason]


# --- names --------------------------------------------------------------------------------------


def test_unknown_backend() -> None:
    refused(
        ValueError,
        "backend must be one of auto, numpy, llvm, cupy; got 'cuda'",
        Q,
        K,
        K,
        backend="cuda",
    )
    refused(TypeError, "backend must be a name or 'auto'; got None", Q, K, K, backend=None)


def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEATTN_BACKEND", "cuda")
    message = "TILEATTN_BACKEND must be one of auto, numpy, llvm, cupy; got 'cuda'"
    refused(ValueError, message, Q, K, K)
    assert tileattn.forward(Q, K, K, backend="numpy").out.shape == Q.shape
    monkeypatch.setenv("TILEATTN_BACKEND", "cupy")
    with pytest.raises(TypeError, match=r"^q must be a CuPy array; got numpy\.ndarray"):
        tileattn.forward(Q, K, K)
    for value in ("numpy", "auto", ""):
        monkeypatch.setenv("TILEATTN_BACKEND", value)
        assert tileattn.forward(Q, K, K).out.shape == Q.shape


def test_an_unavailable_backend_says_what_to_install(cupy: FakeArray) -> None:
    reason = tileattn.available_backends()["cupy"]
    if reason is None:
        pytest.skip("CuPy can run here")
    assert "pip install" in reason
    with pytest.raises(BackendUnavailableError) as caught:
        tileattn.forward(cupy, cupy, cupy)
    assert str(caught.value) == f"backend 'cupy' cannot run here: {reason}"
    assert isinstance(caught.value, RuntimeError)


# --- backends of others -------------------------------------------------------------------------


class Picky(NumpyBackend):
    """Serves nothing with dropout."""

    name = "picky"

    def why_not(self, problem: Problem) -> str | None:
        return "it has no dropout" if problem.dropout_p else None


def test_a_registered_backend_is_used_when_it_is_named() -> None:
    tileattn.register_backend(Picky())
    assert tileattn.available_backends()["picky"] is None
    assert tileattn.explain(Q, K, K, backend="picky").backend == "picky"
    assert tileattn.explain(Q, K, K).backend in {"numpy", "llvm"}


def test_unsupported_names_a_backend_that_serves() -> None:
    tileattn.register_backend(Picky())
    message = "backend 'picky' does not support this: it has no dropout; use backend='numpy'"
    refused(UnsupportedError, message, Q, K, K, backend="picky", dropout_p=0.5)
    out = np.full_like(Q, 9)
    with pytest.raises(NotImplementedError):
        tileattn.forward(Q, K, Q[:, :2, :5], backend="picky", dropout_p=0.5, out=out)
    assert np.all(out == 9)


def test_unsupported_where_nobody_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (NumpyBackend, LlvmBackend, CupyBackend):
        monkeypatch.setattr(backend, "why_not", lambda *_: "today is Sunday")
    message = "backend '{}' does not support this: today is Sunday; no registered backend does"
    preferred = "numpy" if tileattn.available_backends()["llvm"] else "llvm"
    refused(UnsupportedError, message.format(preferred), Q, K, K)
    refused(UnsupportedError, message.format("numpy"), Q, K, K, backend="numpy")


def named(name: Any) -> NumpyBackend:
    backend = NumpyBackend()
    backend.name = name
    return backend


@pytest.mark.parametrize(
    ("backend", "error", "message"),
    [
        (
            object(),
            TypeError,
            "backend must be a Backend; object lacks backward, explain, forward, name, owns, "
            "unavailable, why_not",
        ),
        (NumpyBackend, TypeError, "backend must be an instance; got the class NumpyBackend"),
        (named("a b"), ValueError, "backend.name must be an identifier; got 'a b'"),
        (named(""), ValueError, "backend.name must be an identifier; got ''"),
        (named(7), ValueError, "backend.name must be an identifier; got 7"),
        (
            named("auto"),
            ValueError,
            "backend.name must be in lower case, and not 'auto'; got 'auto'",
        ),
        (
            named("Mine"),
            ValueError,
            "backend.name must be in lower case, and not 'auto'; got 'Mine'",
        ),
    ],
)
def test_what_cannot_be_registered(backend: Any, error: type[Exception], message: str) -> None:
    before = set(tileattn.available_backends())
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        tileattn.register_backend(backend)
    assert set(tileattn.available_backends()) == before


class Exchanged:
    """An array of another library that hands over its memory."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_arrays_of_other_libraries_get_the_remedy_of_their_kind() -> None:
    x = Exchanged(Q)
    with pytest.raises(TypeError, match=r"numpy\.from_dlpack\(q\) makes one"):
        tileattn.forward(x, x, x)
    np.testing.assert_array_equal(np.from_dlpack(x), Q)
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(Q.shape)
    with pytest.raises(TypeError, match=r"tileattn\.torch\.attention takes tensors"):
        tileattn.forward(tensor, tensor, tensor)
    with pytest.raises(TypeError, match=r"x\.numpy\(force=True\) makes an array"):
        tileattn.rope(tensor, tensor, tensor)
