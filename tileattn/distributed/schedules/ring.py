"""Ring attention: keys and values travel from rank to rank, and every rank keeps its queries.

In ring step t rank r computes with the keys of rank ``r - t`` and sends them to rank ``r + 1``. The
messages of a step start together. Keys travel only as far as the last rank that attends to them. In
the backward pass each rank adds its dk and dv to the sums it receives and sends them on, always in
the same order. The last rank returns the sums to the owner of the keys, which adds its own group.

References
----------
Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers, arXiv:2310.01889.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from tileattn.distributed.arrays import add_narrow, library
from tileattn.distributed.call import Call
from tileattn.distributed.comm.failures import wait
from tileattn.distributed.comm.protocol import Transfer
from tileattn.distributed.schedules.blockwise_attention import Pair, Sums, attend, zero_sums
from tileattn.distributed.schedules.head_groups import BackwardGroup, ForwardGroup

_KEYS, _GRADIENTS, _RETURNED = 0, 2, 4  # tags; each has one for k and one for v
_KINDS = 6


def forward(groups: Iterable[ForwardGroup], *, ahead: bool) -> None:  # noqa: ARG001 - of all schedules
    """Compute the rows of this rank's queries; keys of a head group travel during its matmuls."""
    for group in groups:
        to = group.room()
        attend(group.call, _arriving(group.call), to)
        group.finish(to)
        del to


def backward(groups: Iterable[BackwardGroup], *, ahead: bool) -> None:
    """Compute the gradients of this rank's arrays, and its part of shared gradients.

    With ``ahead``, dk and dv return while the next head group is computed.
    """
    returned: Callable[[], None] | None = None
    for group in groups:
        returned = _backward(group, returned)
        if not ahead:
            returned()
            returned = None
    if returned is not None:
        returned()


def _backward(group: BackwardGroup, earlier: Callable[[], None] | None) -> Callable[[], None]:
    """Compute the gradients of a head group; return a function that waits for dk and dv.

    ``earlier`` is this function of the head group before; it is called after the first step.
    """
    call, dq = group.call, group.room()
    sums = Sums(call, group.upstream, group.wrt, dq, group.parameters)
    gradients = _Gradients(call)
    for step, source, pair in _steps(call):
        arrived = partial(gradients.arrived, source)
        found = None if pair is None else sums.of_keys(source, *pair, arrived)
        del pair
        if step == 0 and earlier is not None:
            earlier()
        gradients.pass_on(step, source, found)
        del found
    sums.finish()
    own, others, under_way = gradients.own, gradients.others, gradients.under_way
    if own is None:
        raise RuntimeError("a rank has no gradients of its own keys")
    del call, sums, gradients, arrived
    group.finish_rows(dq)

    def returned() -> None:
        wait(under_way)
        under_way.clear()  # release the arrays that were sent
        for total, x in zip(own, others or (), strict=False):
            add_narrow(total, x)
        group.finish_keys(*own)

    return returned


class _Gradients:
    """Sums of dk and dv, which follow the keys and values around the ring."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._earlier: Pair | None = None  # sums of the ranks before, for the keys of a step
        self.own: Pair | None = None  # this rank's part for its own keys
        self.others: Pair | None = None  # the other ranks' sums for this rank's keys
        self.under_way: list[Transfer] = []

    def arrived(self, source: int) -> Pair:
        """Wait for the sums of the ranks before, and return them; zeros for the first rank."""
        self._wait()
        found, self._earlier = self._earlier, None
        if found is None:
            found = zero_sums(self._call, self._call.blocks.k_layout.length_of(source))
        return found

    def pass_on(self, step: int, source: int, found: Pair | None) -> None:
        """Send the sums of a step, and start to receive the sums for the next step."""
        if step == 0:
            self.own = found
            return
        self._wait()
        comm, reach = self._call.comm, self._call.blocks.reach
        rank, size = comm.rank, comm.size
        upcoming = (source - 1) % size
        with comm.together():
            if found is not None and step < reach[source]:
                self._send(found, source, (rank + 1) % size, _GRADIENTS)
            elif found is not None:
                self._send(found, source, source, _RETURNED)
            if step < reach[upcoming]:
                self._earlier = self._receive(upcoming, (rank - 1) % size, _GRADIENTS)
            if step == reach[rank]:
                self.others = self._receive(rank, (rank + step) % size, _RETURNED)

    def _wait(self) -> None:
        """Wait for pending messages, and release their arrays."""
        wait(self.under_way)
        self.under_way = []

    def _send(self, pair: Pair, source: int, to: int, kind: int) -> None:
        self.under_way += _send(self._call, pair, source, to, kind)

    def _receive(self, source: int, sender: int, kind: int) -> Pair:
        found, arriving = _receive(self._call, source, sender, kind)
        self.under_way += arriving
        return found


def _arriving(call: Call) -> Iterator[tuple[int, Pair]]:
    """Yield the keys and values that reach this rank, starting with its own."""
    for _, source, pair in _steps(call):
        if pair is not None:
            yield source, pair
        del pair


def _steps(call: Call) -> Iterator[tuple[int, int, Pair | None]]:
    """Yield each step, the rank that owns the keys, and keys and values if they travel this far.

    They are sent on while the rank computes, and the next ones are received: two buffers.
    """
    rank, size, reach = call.comm.rank, call.comm.size, call.blocks.reach
    xp, x = library(call.operands.k), call.operands
    pair: Pair | None = (xp.ascontiguousarray(x.k), xp.ascontiguousarray(x.v))
    under_way: list[Transfer] = []
    for step in range(size):
        source, upcoming = (rank - step) % size, (rank - step - 1) % size
        wait(under_way)
        following: Pair | None = None
        under_way = []
        with call.comm.together():
            if pair is not None and step < reach[source]:
                under_way += _send(call, pair, source, (rank + 1) % size, _KEYS)
            if step < reach[upcoming]:
                following, arriving = _receive(call, upcoming, (rank - 1) % size, _KEYS)
                under_way += arriving
        yield step, source, pair
        pair = following
    wait(under_way)


def _send(call: Call, pair: Pair, source: int, to: int, kind: int) -> list[Transfer]:
    return [call.comm.send(x, to, source * _KINDS + kind + n) for n, x in enumerate(pair)]


def _receive(call: Call, source: int, sender: int, kind: int) -> tuple[Pair, list[Transfer]]:
    """Start to receive keys and values of a rank, or their gradients."""
    P, n = call.problem, call.blocks.k_layout.length_of(source)
    dtype = P.dtype if kind == _KEYS else call.sums
    xp = library(call.operands.k)
    k, v = (xp.empty((P.B, P.Hkv, n, columns), dtype) for columns in (P.D, P.Dv))
    tags = (source * _KINDS + kind + m for m in range(2))
    return (k, v), [call.comm.receive(x, sender, tag) for x, tag in zip((k, v), tags, strict=True)]
