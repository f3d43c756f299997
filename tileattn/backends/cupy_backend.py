"""CuPy arrays: known, so that errors can say what to do; this version has no kernels for them."""

import sys
from typing import Any, NoReturn

from tileattn.backends.protocol import Explanation
from tileattn.errors import BackendUnavailableError
from tileattn.problem import Operands, Problem
from tileattn.results import Attention, Gradients

_REASON = (
    "this version has no CUDA kernels; convert with cupy.asnumpy and use backend='numpy', or look "
    "for a newer one: pip install --upgrade 'tileattn[cuda13]'"
)


class CupyBackend:
    """The place of the CUDA kernels."""

    name = "cupy"

    def owns(self, x: Any) -> bool:
        """Whether ``x`` is a CuPy array, found without importing CuPy."""
        cupy = sys.modules.get("cupy")
        return cupy is not None and isinstance(x, cupy.ndarray)

    def unavailable(self) -> str | None:
        """Why the backend cannot run here."""
        return _REASON

    def why_not(self, problem: Problem) -> str | None:  # noqa: ARG002 - the protocol's argument
        """Why a problem is not served: none is."""
        return _REASON

    def forward(self, problem: Problem, operands: Operands, out: Any | None) -> Attention:
        """Refuse."""
        self._refuse(problem, operands, out)

    def backward(
        self,
        problem: Problem,
        operands: Operands,
        dout: Any,
        attention: Attention,
        dlse: Any | None,
        deterministic: bool,
    ) -> Gradients:
        """Refuse."""
        self._refuse(problem, operands, dout, attention, dlse, deterministic)

    def explain(self, problem: Problem, operands: Operands) -> Explanation:
        """Refuse."""
        self._refuse(problem, operands)

    def _refuse(self, *_: Any) -> NoReturn:
        raise BackendUnavailableError(f"backend {self.name!r} cannot run here: {_REASON}")
