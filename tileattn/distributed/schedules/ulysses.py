"""Ulysses: after an all-to-all each rank computes its heads over all tokens, in one call a group.

Results are bitwise identical to a call on one device.

References
----------
Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from collections.abc import Iterable
from typing import Any

import tileattn
from tileattn.distributed.arrays import add_narrow
from tileattn.distributed.call import Call, requested_gradients
from tileattn.distributed.layout import Segment
from tileattn.distributed.schedules.head_groups import BackwardGroup, ForwardGroup


def forward(groups: Iterable[ForwardGroup], *, ahead: bool) -> None:  # noqa: ARG001 - of all schedules
    """Compute all rows."""
    for group in groups:
        x = group.call.operands
        found = tileattn.forward(x.q, x.k, x.v, **_options(group.call))
        del x  # free the operands before the next group
        group.finish(found)
        del found


def backward(groups: Iterable[BackwardGroup], *, ahead: bool) -> None:  # noqa: ARG001 - of all schedules
    """Compute all gradients."""
    for group in groups:
        x, given, (dbias, dsinks, daux) = group.call.operands, group.upstream, group.parameters
        options = _options(group.call)
        grads = tileattn.backward(
            *(given.dout, x.q, x.k, x.v, given.out, given.lse),
            dlse=given.dlse,
            wrt=requested_gradients(group.wrt, options),
            deterministic=group.call.deterministic,
            **options,
        )
        del x, given, options
        of_parameters = (dbias, grads.dbias), (dsinks, grads.dsinks)
        for total, found in (*of_parameters, *zip(daux, grads.daux or (), strict=False)):
            if total is not None and found is not None:
                add_narrow(total, found)
        dq, dk, dv = grads[:3]
        del grads
        group.finish_rows(dq)
        del dq
        group.finish_keys(dk, dv)
        del dk, dv


def _options(call: Call) -> dict[str, Any]:
    lengths = call.blocks.q_layout.length, call.blocks.k_layout.length
    whole = (Segment(0, n, slice(0, n)) for n in lengths)
    return call.block(*whole) | {"sinks": call.operands.sinks}
