"""The arrays that functions read: ``aux``, followed by captured arrays."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from tileattn.dtypes import DTYPES, one_of
from tileattn.expressions.nodes import Kind


class AuxArrays(list[Any]):
    """The arrays of a call: ``aux``, which are parameters, and captured arrays.

    Parameters
    ----------
    aux : iterable of array
        Arrays that the caller passes.
    """

    def __init__(self, aux: Iterable[Any] = ()) -> None:
        super().__init__(aux)
        self.parameters = tuple(self)

    def number(self, x: Any) -> int:
        """Return the number of an array; append it if it is new."""
        for n, known in enumerate(self):
            if known is x:
                return n
        self.append(x)
        return len(self) - 1

    def symbol(self, _x: Any) -> Any:
        """Return an array without axes that holds a symbolic number; None for other objects."""
        return None


def kind_of(x: Any) -> Kind | None:
    """Return the kind of an array's elements; None if ``aux`` does not support its dtype."""
    dtype = dtype_of(x)
    if dtype is None or dtype in DTYPES:
        return None if dtype is None else Kind.FLOAT
    if dtype == np.bool_:
        return Kind.BOOLEAN
    fits = dtype.kind == "i" or (dtype.kind == "u" and dtype.itemsize < 8)
    return Kind.INTEGER if fits and dtype.isnative else None


def check_kind(name: str, x: Any) -> None:
    """Raise TypeError if an array has a dtype that functions cannot read."""
    if kind_of(x) is None:
        raise TypeError(
            f"{name} must hold booleans, integers of up to 64 bits but not uint64, or "
            f"{one_of(DTYPES)}; got dtype {str(x.dtype).removeprefix('torch.')}"
        )


def dtype_of(x: Any) -> np.dtype[Any] | None:
    """Return the NumPy dtype of an array of any library; None if NumPy has no such dtype."""
    if isinstance(x.dtype, np.dtype):
        return x.dtype
    try:
        return np.dtype(str(x.dtype).removeprefix("torch."))
    except TypeError:
        return None


def is_array(x: Any) -> bool:
    """Return True for an array of any library; False for NumPy scalars."""
    has_all = all(hasattr(x, name) for name in ("shape", "dtype", "__getitem__"))
    return has_all and not isinstance(x, np.generic | type)
