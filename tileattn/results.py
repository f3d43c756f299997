"""Results of ``forward`` and ``backward``."""

from typing import Any, NamedTuple


class Attention(NamedTuple):
    """Result of ``forward``.

    Parameters
    ----------
    out : array, shape (B, Hq, Nq, Dv)
        Weighted sums of the values; dtype of ``q``. Without the leading axes that ``q`` lacks.
    lse : array, shape (B, Hq, Nq)
        Logsumexp (natural) of the scores of each query, its sink included; float64 where ``q`` is
        float64, float32 otherwise.
    """

    out: Any
    lse: Any


class _Gradients(NamedTuple):
    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsinks: Any


class Gradients(_Gradients):
    """Result of ``backward``: the gradient for each input, of that input's shape and dtype.

    Gradients that ``wrt`` leaves out are None.

    Parameters
    ----------
    dq : array, shape (B, Hq, Nq, D)
        Gradient for ``q``.
    dk : array, shape (B, Hkv, Nk, D)
        Gradient for ``k``, summed over the query heads that share a key head.
    dv : array, shape (B, Hkv, Nk, Dv)
        Gradient for ``v``, summed in the same way.
    dbias : array or None
        Gradient for ``bias``, summed over the axes along which it was broadcast; None where the
        call has no ``bias``.
    dsinks : array, shape (Hq,), or None
        Gradient for ``sinks``; None where the call has no ``sinks``.
    daux : tuple of (array or None), or None
        Gradients for ``aux``, None for arrays of integers and of booleans; None where the call has
        no ``aux``. An attribute, and not one of the five that unpacking gives.
    """

    daux: tuple[Any, ...] | None = None

    def __new__(
        cls,
        dq: Any,
        dk: Any,
        dv: Any,
        dbias: Any,
        dsinks: Any,
        daux: tuple[Any, ...] | None = None,
    ) -> "Gradients":
        made = super().__new__(cls, dq, dk, dv, dbias, dsinks)
        made.daux = daux
        return made

    def _replace(self, **changed: Any) -> "Gradients":
        return Gradients(**(self._asdict() | {"daux": self.daux} | changed))
