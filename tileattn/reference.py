"""The oracle: attention on whole matrices in float64, of every call that the library takes.

A call is validated by the library's own code, so that the two agree on what is a call. The
arithmetic, in ``tileattn.oracle.dense``, shares no code with the library.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tileattn.call.parse import (
    arrays_of,
    check_dtype,
    check_shape,
    device_integers,
    parse,
    refuse_caches,
)
from tileattn.expressions.captures import with_parameters
from tileattn.expressions.functions import read_functions
from tileattn.oracle.dense import evaluate_backward, evaluate_forward
from tileattn.results import Attention, Gradients
from tileattn.validation import check_flags, on_host, require_numpy

__all__ = ["backward", "forward"]

Array = NDArray[Any]


def forward(q: Array, k: Array, v: Array, **options: Any) -> Attention:
    """Compute attention densely in float64.

    Parameters
    ----------
    q : array, shape (B, Hq, Nq, D)
        Queries. ``(Hq, Nq, D)`` and ``(Nq, D)`` are allowed. With ``cu_seqlens_q`` or
        ``cu_seqlens_k``, B is 1 and Nq and Nk count the tokens of all sequences. Arrays are
        NumPy's; arrays and tensors of PyTorch, CuPy and JAX are copied.
    k : array, shape (B, Hkv, Nk, D)
        Keys.
    v : array, shape (B, Hkv, Nk, Dv)
        Values.
    **options
        The options of ``tileattn.forward``, without ``backend`` and ``out``.

    Returns
    -------
    Attention
        ``out`` and ``lse``, both NumPy arrays of float64.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As ``tileattn.forward``.

    Notes
    -----
    ``S = score_mod(softcap(scale q k^T) + alibi + bias)``, ``lse = log(sum_j exp(S) + exp(sink))``,
    ``P = exp(S - lse)``, ``out = (keep P / (1 - dropout_p)) v``.

    References
    ----------
    Vaswani et al., "Attention is all you need", arXiv:1706.03762, equation 1.

    Examples
    --------
    >>> x = np.array([[1.0], [3.0]])
    >>> forward(x, 0 * x, x).out
    array([[2.],
           [2.]])
    """
    q, k, v = on_host((q, k, v))
    options = check_call(q, k, v, _on_host(options))
    out, lse = evaluate_forward(q, k, v, np.float64, options).results
    lead = (0,) * (4 - q.ndim)
    return Attention(out[lead], lse[lead])


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None = None,
    lse: Array | None = None,
    *,
    dlse: Array | None = None,
    deterministic: bool = False,
    **options: Any,
) -> Gradients:
    """Compute the gradients of attention densely in float64.

    Parameters
    ----------
    dout : array, shape (B, Hq, Nq, Dv)
        Upstream gradient of ``out``; of any floating dtype, as are the next three.
    q, k, v : array
        As in ``forward``.
    out, lse : array, optional
        Accepted so that the call is that of ``tileattn.backward``; the oracle computes its own.
    dlse : array, shape (B, Hq, Nq), optional
        Upstream gradient of ``lse``.
    deterministic : bool
        Accepted for the same reason; the oracle always is.
    **options
        Those that the forward call had.

    Returns
    -------
    Gradients
        All NumPy arrays of float64; ``dbias`` and ``dsinks`` are None without ``bias`` and
        ``sinks``, ``daux`` without ``aux``.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As ``tileattn.backward``.

    Notes
    -----
    ``dP = keep (dout v^T) / (1 - dropout_p)``, ``delta_i = sum_j P dP``,
    ``dS = P (dP - delta + dlse)``; the rest is the chain rule for each score modifier.

    References
    ----------
    Dao et al., "FlashAttention", arXiv:2205.14135, appendix B.2.
    """
    refuse_caches("backward", options)
    dout, q, k, v, out, lse, dlse = on_host((dout, q, k, v, out, lse, dlse))
    options = _on_host(options)
    options = check_call(q, k, v, options, dout=dout, out=out, lse=lse, dlse=dlse)
    check_flags(deterministic=deterministic)
    dense = evaluate_forward(q, k, v, np.float64, options)
    grads = evaluate_backward(dense, dout, dlse).grads
    lead = (0,) * (4 - q.ndim)
    return grads._replace(dq=grads.dq[lead], dk=grads.dk[lead], dv=grads.dv[lead])


def _on_host(options: dict[str, Any]) -> dict[str, Any]:
    """Copy the arrays of options to NumPy."""
    return {name: on_host(x) for name, x in options.items()}


def check_call(q: Any, k: Any, v: Any, options: dict[str, Any], **rows: Any) -> dict[str, Any]:
    """Validate a call as the library does; results and their gradients may have any dtype.

    Return its options, where arrays that functions capture are parameters.
    """
    rows = {name: x for name, x in rows.items() if x is not None or name == "dout"}
    arrays = {"q": q, "k": k, "v": v, **rows, **arrays_of(options), **device_integers(options)}
    for name, x in arrays.items():
        require_numpy(name, x)
    read = read_functions(options)
    problem, _ = parse(q, k, v, read)
    for name, x in rows.items():
        check_dtype(name, x)
        check_shape(name, x, problem.shape_of(name))
    return with_parameters(options, read.get("aux") or ())
