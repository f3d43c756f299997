"""``tileattn.torch.explain``: what a call on tensors would run."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import tileattn
from tileattn.backends.protocol import Explanation
from tileattn.torch.functions import read_functions
from tileattn.torch.inputs import inputs_of
from tileattn.torch.operators import TENSORS, on_arrays
from tileattn.torch.tensors import autocast, check_memory, check_tensor, on


def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, backend: str = "auto", **options: Any
) -> Explanation:
    """Describe what `attention` would run for a call, without running it.

    Parameters
    ----------
    q, k, v : torch.Tensor
        As for `attention`, on the CPU or on an NVIDIA GPU.
    backend : str
        As for ``tileattn.forward``.
    **options
        The options of ``tileattn.forward``, with tensors instead of arrays.

    Returns
    -------
    Explanation
        The result of ``tileattn.explain``: backend, kernel, tile sizes, and the reasons for the
        choice. ``str()`` of it is a short report.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, BackendUnavailableError
        As `attention`.

    Notes
    -----
    As in `attention`, autocast converts q, k and v. ``torch.compile`` does not compile the call.

    Examples
    --------
    >>> import torch
    >>> from tileattn.torch import explain
    >>> x = torch.zeros(1, 1, 1024, 64)
    >>> report = explain(x, x, x, causal=True, backend="numpy")
    >>> report.kernel, report.reasons[0]
    ('tileattn.algorithm.spec', "backend='numpy' asks for it")
    """
    report: Explanation = _explain((q, k, v), backend, options)
    return report


@torch.compiler.disable  # type: ignore[untyped-decorator]  # PyTorch's
def _explain(rows: Sequence[Any], backend: str, options: Mapping[str, Any]) -> Any:
    check_tensor("q", rows[0], kinds=("cpu", "cuda"))
    device = rows[0].device
    inputs = inputs_of(autocast(*rows), backend, False, read_functions(options, device))
    for name, x in zip(TENSORS, inputs, strict=False):
        if x is not None:
            check_memory(name, x)
    with on(device):
        return on_arrays(tileattn.explain, inputs)
