"""The schedule of one rank, which holds all tokens: one call, with its bits."""

from typing import Any

import tileattn
from tileattn.distributed.call import Array, Call
from tileattn.distributed.layout import Segment
from tileattn.results import Attention, Gradients


def forward(call: Call) -> Attention:
    """Compute all rows."""
    x = call.operands
    return tileattn.forward(x.q, x.k, x.v, **_options(call))


def backward(
    call: Call, dout: Array, attention: Attention, dlse: Array | None, wrt: frozenset[str]
) -> Gradients:
    """Compute all gradients."""
    x, names = call.operands, tuple(sorted(wrt))
    return tileattn.backward(
        dout,
        x.q,
        x.k,
        x.v,
        *attention,
        dlse=dlse,
        wrt=names,
        deterministic=call.deterministic,
        **_options(call),
    )


def _options(call: Call) -> dict[str, Any]:
    lengths = call.q_layout.length, call.k_layout.length
    options = call.block(*(Segment(0, n, slice(0, n)) for n in lengths))
    return options | {"sinks": call.operands.sinks}
