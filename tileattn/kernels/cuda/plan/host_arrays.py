"""Arrays of a call that are on the host: their values are part of a plan."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tileattn.call.problem import Operands
from tileattn.kernels.cuda.families.cuda_text import NEAR
from tileattn.kernels.cuda.plan.layout import ArrayLayout, CallLayout, Constant, array_layout
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


def host_layout(
    x: Operands, layout_of: Callable[[Any], ArrayLayout] = lambda array: array_layout(array, 0)
) -> CallLayout:
    """Describe a call whose arrays are on the host as if they were on a device.

    ``layout_of`` describes an array. Integers keep their values.
    """
    given = {"q": x.q, "k": x.k, "v": x.v, **x.option_arrays}
    if x.paging is not None:
        given["block_table"] = x.paging.block_table
    packing = {} if x.packing is None else x.packing._asdict()
    return CallLayout(
        tuple((name, layout_of(array)) for name, array in given.items()),
        tuple(x.kv_lengths.tolist()),
        tuple(x.q_offset.tolist()),
        x.block_mask,
        cu_seqlens=tuple(
            (n, tuple(ends.tolist())) for n, ends in packing.items() if ends is not None
        ),
        **host_arrays(x),
    )
