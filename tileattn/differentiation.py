"""Forward and backward with one set of options."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Unpack

import numpy as np

from tileattn.api import backward, forward
from tileattn.call.options import Options
from tileattn.call.parse import refuse_caches
from tileattn.expressions.functions import read_functions
from tileattn.results import Attention, Gradients


def vjp(
    q: Any, k: Any, v: Any, *, backend: str = "auto", **options: Unpack[Options]
) -> tuple[Attention, Callable[..., Gradients]]:
    """Exact attention and its vector-Jacobian product: the options are given once.

    Parameters
    ----------
    q, k, v : array
        As for ``forward``.
    backend : str
        As for ``forward``.
    **options
        As for ``forward``; they hold for both passes.

    Returns
    -------
    attention : Attention
        As ``forward`` returns it.
    pullback : callable
        ``pullback(dout, dlse=None, deterministic=False, workspace=None, wrt=None)`` returns
        ``Gradients``, as ``backward`` does. It may be called any number of times.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it.
    BackendUnavailableError
        If the backend cannot run here.
    UnsupportedError
        If the backend does not support this problem; with ``block_table``.

    Notes
    -----
    ``pullback`` maps the upstream gradients dout and dlse to their products with the Jacobian of
    ``(out, lse)``. It copies lists, lengths and offsets. It keeps references to the other inputs,
    options and results: do not write to them before its last call. ``vjp`` reads ``score_mod`` and
    ``mask_mod`` once; ``pullback`` differentiates what it read.

    Examples
    --------
    >>> import numpy as np
    >>> import tileattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 5, 8))
    >>> (out, lse), pullback = tileattn.vjp(q, k, v, causal=True)
    >>> dq, dk, dv, dbias, dsinks = pullback(np.ones_like(out))
    >>> dq.shape, dbias is None
    ((5, 8), True)
    """
    refuse_caches("vjp", options)
    options = read_functions(options)
    attention = forward(q, k, v, backend=backend, **options)
    kept: Any = {name: _kept(x) for name, x in options.items()}

    def pullback(
        dout: Any,
        dlse: Any | None = None,
        deterministic: bool = False,
        workspace: Any | None = None,
        wrt: Sequence[str] | None = None,
    ) -> Gradients:
        """Compute the gradients of the inputs from dout and dlse; see ``backward``."""
        return backward(
            *(dout, q, k, v, *attention),
            dlse=dlse,
            deterministic=deterministic,
            wrt=wrt,
            backend=backend,
            workspace=workspace,
            **kept,
        )

    return attention, pullback


def _kept(x: Any) -> Any:
    """Copy what callers reuse: lists, and on the host integers and numbers without axes."""
    small = isinstance(x, np.ndarray) and (x.dtype.kind in "iu" or not x.shape)
    return copy(x) if small or type(x) is list else x
