"""The plan of a plain pass: what the numbers of a call decide.

Planning needs arithmetic and comparisons only, so that its path can be compiled: see
`tileattn.call.straight_line`.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from tileattn.backends.described import Described, Lengths
from tileattn.backends.llvm.execute import sizes_of
from tileattn.backends.llvm.tasks import Division, divide
from tileattn.call.problem import Operands, Problem
from tileattn.kernels.llvm.params import row_strides
from tileattn.kernels.llvm.sizes import SECTION, padded
from tileattn.kernels.llvm.target import Target


class KernelPlan(NamedTuple):
    """What the numbers of a call decide about a kernel of a plain pass."""

    sizes: tuple[int, ...]  # as `sizes_of`
    steps: list[int]  # as `row_strides`
    division: Division

    @property
    def numbers(self) -> list[int]:
        """All of them, in the order in which `PlainKernel` reads them."""
        _, grids, workspace, _ = self.division
        found = [*self.sizes, *self.division.fields, *self.steps]
        for x in (*grids, *workspace.values()):
            found += x
        return found


def flat(plans: Mapping[str, KernelPlan]) -> list[int]:
    """List the numbers of all kernels of a pass."""
    return [n for plan in plans.values() for n in plan.numbers]


def forward_kernels(lengths: Lengths, few: int) -> list[str]:
    """Name the forward kernels that run; packed lengths may need both."""
    names = ["decode"] if lengths.fewest <= few else []
    return [*names, "forward"] if lengths.most > few else names


def plain_plans(
    backend: Any,
    P: Problem,
    x: Operands,
    lengths: Lengths,
    others: Sequence[Any],
    names: Container[str],
) -> tuple[Target, dict[str, KernelPlan]] | None:
    """Plan the kernels of a plain pass, by name; None if one target is not enough.

    ``others`` are the rows that the backward pass reads besides q, k and v: dout, out, lse and, if
    given, dlse. ``names`` are the arrays that are no rows.
    """
    few, targets, batch = backend.few_queries(P), backend.targets_of(P), lengths.batch(P)
    kernels = ["backward"] if others else forward_kernels(lengths, few)
    if kernels == ["decode"]:
        targets = targets[-1:]
    if len(targets) > 1 or (others and batch.Nk > SECTION):
        return None
    rows = _backward_rows(P, x, others, targets[0]) if others else _forward_rows(P, x)
    steps, sizes, few = row_strides(rows, P.is_packed), sizes_of(batch), 0 if others else few
    common = targets[0], x, names, backend.split_keys, few, lengths.longest
    plans = {name: KernelPlan(sizes, steps, divide(name, batch, *common)) for name in kernels}
    return targets[0], plans


def _forward_rows(P: Problem, x: Operands) -> list[Any]:
    """Return the rows of a forward pass, as the block begins with them."""
    shape = P.B, P.Hq, P.Nq, P.Dv
    return [*x[:3], Described.dense(shape, P.dtype), Described.dense(shape[:-1], P.accum_dtype)]


def _backward_rows(P: Problem, x: Operands, others: Sequence[Any], target: Target) -> list[Any]:
    """Return the rows of a backward pass, as the block begins with them."""
    (q, k, v), (dout, out, _, *dlse), accum = x[:3], others, P.accum_dtype
    of_rows = Described.dense((P.B, P.Hq, P.Nq), accum)  # lse, log_l and delta
    columns = padded(target, accum.itemsize, P.D)
    sums = Described.dense((P.B, P.Hq, P.Nq, columns), accum)
    results = [Described.dense(a.shape, P.dtype) for a in (q, k, v)]
    return [q, k, v, out, of_rows, dout, of_rows, of_rows, sums, *results, *dlse]
