"""``tileattn.jax.attention``: check a call on JAX arrays, and hand it on."""

from typing import Any

import jax

from tileattn.expressions.functions import read_functions
from tileattn.jax.arrays import arrays_of
from tileattn.jax.call import call_of
from tileattn.jax.callbacks import Callbacks
from tileattn.jax.differentiation import differentiable
from tileattn.jax.manual_axes import axes_of, varying
from tileattn.results import Attention
from tileattn.validation import check_flags


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Any:
    """Exact attention on JAX arrays, differentiable in q, k, v, bias, sinks and aux.

    Parameters
    ----------
    q : jax.Array, shape (B, Hq, Nq, D), (Hq, Nq, D) or (Nq, D)
        Queries; float16, bfloat16, float32 or float64, on the CPU or an NVIDIA GPU.
    k : jax.Array, shape (B, Hkv, Nk, D), (Hkv, Nk, D) or (Nk, D)
        Keys, of the dtype of q, or with ``k_descale`` of int8 or float8_e4m3fn.
    v : jax.Array, shape (B, Hkv, Nk, Dv), (Hkv, Nk, Dv) or (Nk, Dv)
        Values.
    return_lse : bool
        Return the logsumexp of each query, too; it is differentiable.
    backend : str
        As for ``tileattn.forward``.
    **options
        The options of ``tileattn.forward``. Arrays are JAX or NumPy arrays. Arrays, lengths and
        offsets may be traced, and so may numbers and arrays that functions capture. Other options
        are part of the program. Outside of ``jax.jit``, new numbers need no new program. A seed
        that is a JAX array may be traced; on a GPU the host waits for its value.

    Returns
    -------
    jax.Array, shape (B, Hq, Nq, Dv), or Attention
        The output, or with ``return_lse`` the pair ``(out, lse)``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; the message names it. If only the values of a JAX
        array are wrong, the compiled program raises a JAX error with this message.
    UnsupportedError
        If no backend supports the call, an array is on another device, or ``alibi_slopes`` is
        differentiated.

    Notes
    -----
    The compiled program calls the library on its own memory, as NumPy or CuPy arrays; on a GPU the
    call runs on XLA's stream, without copies. Only the gradients that JAX needs are computed. Under
    ``vmap`` there is a call for each element, all with the same seed if the seed is a number.

    Examples
    --------
    >>> import jax
    >>> from tileattn.jax import attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 100, 32))
    >>> attention(q, k, v, causal=True).shape
    (2, 4, 100, 32)
    """
    check_flags(return_lse=return_lse)
    options = read_functions(options)
    arrays = arrays_of(q, k, v, options)
    arrays = varying(arrays, axes_of(arrays))
    call = call_of(arrays, backend, options)
    result = Attention(*differentiable(Callbacks(call), arrays))
    return result if return_lse else result.out
