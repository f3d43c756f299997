"""Arrays of a call that are on the host: their values are part of a plan."""

from typing import Any

import numpy as np

from tileattn.call.problem import Operands
from tileattn.kernels.cuda.families.cuda_text import NEAR
from tileattn.kernels.cuda.plan.layout import Constant
from tileattn.kernels.cuda.plan.params import aux_name


def host_arrays(x: Operands) -> dict[str, Any]:
    """Return the fields of a `CallLayout` for the origin and for host arrays of functions.

    Functions count from a near origin in 32 bits.
    """
    arrays = {n: a for n, a in enumerate(x.aux) if type(a) is np.ndarray}
    near = None
    for n, a in arrays.items():
        if a is x.origin and (a[:, 2:] < NEAR).all():
            arrays[n], near = a.astype(np.int32), n
    return {
        "host_aux": tuple((aux_name(n), Constant.of(a)) for n, a in arrays.items()),
        "origin": None if x.origin is None else Constant.of(x.origin),
        "near_origin": near,
    }
