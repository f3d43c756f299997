"""Fill the numbers of a new call into a plan of its kind, by arithmetic alone.

`launch_plan` describes a call in full: its result can be printed, compared and explained. A
`Filler` is made from one such plan, and finds what differs for other numbers in a fraction of the
time. A test holds that both agree.
"""

from array import array
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import KernelLaunch, folds_scale
from tileattn.kernels.cuda.families.grid import GridSizes, padded_rows
from tileattn.kernels.cuda.families.size_class import size_class
from tileattn.kernels.cuda.plan.layout import ROWS, CallLayout
from tileattn.kernels.cuda.plan.params import (
    CELLS,
    ON_DEVICE,
    PACKED,
    SECTIONS,
    constant_cells,
    softcap_field,
)
from tileattn.kernels.cuda.plan.plan import (
    MAX_CARRIED,
    WORD,
    LaunchPlan,
    MaskTiles,
    mask_tiles,
)
from tileattn.kernels.cuda.plan.scheduler import schedule_of
from tileattn.kernels.cuda.plan.straight_line import Compiled, pinned, straight_line
from tileattn.kernels.cuda.plan.workspace import Workspace, workspace_of

# First cells of sections, and of fields that are next to each other.
_SIZES, _SCHEDULE, _WINDOW = CELLS["B"], CELLS["single_heads"], CELLS["length"]
_SPLITS, _SCALARS = CELLS["splits"], CELLS["scale"]
_schedule_cells = attrgetter(*(name for name, _ in SECTIONS["schedule"]))
_SHIFTS = {2: 1, 4: 2, 8: 3}  # to divide by the size of an element
_NONE: Mapping[str, int] = {}
_PLACES = {"kv_lengths": "length", "q_offset": "offset"}

Places = tuple[tuple[int, ...] | None, tuple[int, ...] | None]

# Arrays that a filler describes: rows, and contiguous arrays, of which kernels read no strides.
FILLED = ROWS | {"lse", *_PLACES, "cu_seqlens_q", "cu_seqlens_k"}


class Filled(NamedTuple):
    """What the numbers of a call decide, besides the addresses.

    Parameters
    ----------
    template : bytes
        The parameter block, with null addresses.
    grids : sequence of int
        Thread blocks of each launch.
    workspace : Workspace
        Memory that the pass needs besides its results.
    carried : list of (str, bytes)
        Lengths and offsets that the call writes to its workspace.
    """

    template: bytes
    grids: Sequence[int]
    workspace: Workspace
    carried: list[tuple[str, bytes]]


class Decided(NamedTuple):
    """What the numbers of a problem decide."""

    grids: Sequence[int]
    schedule: Sequence[int]  # the cells of that section
    rows: int
    workspace: Workspace


class Path(NamedTuple):
    """The decisions of a `Filler` for problems that take one path through them."""

    compiled: Compiled
    grids: int  # number of launches
    names: tuple[str, ...]  # parts of the workspace

    def decided(self, P: Problem) -> Decided | None:
        """Decide for a problem; None if it takes another path."""
        x = self.compiled(P.B, P.Hq, P.Hkv, P.Nq, P.Nk, *P.window, P.sequences, P.scale)
        if x is None:
            return None
        n = self.grids
        starts = dict(zip(self.names, x[n + 13 :], strict=True))
        workspace = Workspace(starts, x[n + 11], x[n + 12])
        return Decided(x[:n], x[n : n + 10], x[n + 10], workspace)


def are_uniform(given: Places) -> bool:
    """Return True if all sequences have the same length and offset, or the device has them."""
    return all(not each or each.count(each[0]) == len(each) for each in given)


def can_fill(plan: LaunchPlan, names: Sequence[str]) -> bool:
    """Return True if a plan has only arrays of `FILLED` and arrays that functions read.

    It has no copies, tables or pages, and sums no gradients of these arrays.
    """
    tables = plan.constants or plan.block_mask or plan.problem.is_paged
    others = plan.copies_in or plan.copies_out or not plan.carried.keys() <= {*_PLACES}
    others = others or not plan.aux.keys() <= {*names}
    has_main = any(launch.traits.main for launch in plan.launches)
    return has_main and not (tables or others) and (FILLED | plan.aux.keys()).issuperset(names)


class Filler:
    """Fills other numbers into a plan without tables, for which `can_fill` is true.

    Parameters
    ----------
    plan : LaunchPlan
        The plan of another call with the same `kind_key`.
    names : sequence of str
        The arrays that each call brings, by their names in the parameter block.
    """

    def __init__(self, plan: LaunchPlan, names: Sequence[str]) -> None:
        self._kind = kind = plan.kind
        running = {id(launch.key) for launch in plan.launches}
        self._classifies = any(id(launch.key) in running for launch in kind.classifying)
        launches = (*kind.classifying, *kind.launches) if self._classifies else kind.launches
        self._rules = [(launch.blocks, id(launch.key) in running) for launch in launches]
        self._running = plan.launches
        self._place = next(n for n, launch in enumerate(plan.launches) if launch.traits.main)
        self._main = plan.launches[self._place][:-1]
        self._split_keys = kind.fields.get("split_keys", 0)
        base: list[Any] = [0] * (PACKED.size // WORD)
        for name, value in kind.fields.items():
            base[CELLS[name]] = value
        self._base = base
        self._fixed = tuple(base[_SIZES + 5 : _SIZES + 8])  # D, Dv and group
        self._shift = _SHIFTS[plan.problem.dtype.itemsize]
        self._rows = [(n, CELLS[f"{name}_at"]) for n, name in enumerate(names) if name in ROWS]
        self._brought = [name in names for name in _PLACES]
        self._aux = [names.index(name) for name in plan.aux]

    def path(self, P: Problem, given: Places) -> "Path | None":
        """Compile the decisions for a problem; None if they need more than arithmetic."""
        if self._kind.classifying or not are_uniform(given):
            return None
        layout, device = CallLayout((), given[0], given[1]), self._kind.device
        names: list[str] = []

        def numbers(P: Problem) -> Sequence[Any]:
            for answer in size_class(P, device.tuning, device.sm_count):
                pinned(answer)
            decided = self._decided(P, layout, None)
            if decided is None:
                raise TypeError
            grids, schedule, rows, (starts, first_zero, nbytes) = decided
            names[:] = starts
            return *grids, *schedule, rows, first_zero, nbytes, *starts.values()

        compiled = straight_line(numbers, P)
        return compiled and Path(compiled, len(self._running), tuple(names))

    def fill(
        self,
        P: Problem,
        given: Places,
        arrays: Sequence[Any],
        decided: "Decided | None" = None,
    ) -> Filled | None:
        """Return what a call decides; None if it runs other kernels, or carries too much.

        ``given`` are lengths and offsets, as in `CallLayout`. ``arrays`` have shapes and strides,
        in the order of the names. ``decided`` is from a `Path` of the filler.
        """
        kind, mask = self._kind, None
        carried, places = [], []
        for brought, each, (name, field) in zip(self._brought, given, _PLACES.items(), strict=True):
            value = 0
            if each is None:
                value = 0 if brought else ON_DEVICE[field]
            elif each and each.count(each[0]) == len(each):  # all sequences have the same
                value = each[0]
            elif each:
                words = array("q", each).tobytes()
                if len(words) > MAX_CARRIED:
                    return None
                carried.append((name, words))
            places.append(value)
        if decided is None:
            layout = CallLayout((), given[0], given[1])
            if kind.classifying:
                mask = mask_tiles(kind, P, layout, tables=False)
            parts = {name: len(words) for name, words in carried}
            decided = self._decided(P, layout, mask, parts)
            if decided is None:
                return None
        grids, schedule, rows, workspace = decided
        cells = self._cells(P, arrays, places, schedule, rows)
        if mask is not None:
            for name, x in mask.arrays.items():
                at = CELLS[f"{name}_at"]
                cells[at : at + 4] = x.elements
        template = PACKED.pack(*cells)
        if kind.functions:
            own = [*constant_cells(P)]
            for n in self._aux:
                own += (0, *(arrays[n].shape or (0,)), *(arrays[n].strides or (0,)))
            template += array("q", own).tobytes()
        return Filled(template, grids, workspace, carried)

    def _decided(
        self,
        P: Problem,
        layout: CallLayout,
        mask: MaskTiles | None,
        carried: Mapping[str, int] = _NONE,
    ) -> "Decided | None":
        """Return what follows from the problem; None if it runs other kernels than the plan."""
        kind, sizes = self._kind, GridSizes(P)
        if mask is not None:
            if bool(mask.launches) is not self._classifies:
                return None
            sizes = GridSizes(P, mask_lines=mask.lines)
        grids = []
        for rule, runs in self._rules:
            grid = rule.thread_blocks(sizes)
            if (grid is not None) is not runs:
                return None
            if grid is not None:
                grids.append(grid)
        main = KernelLaunch(*self._main, grids[self._place])
        schedule = schedule_of(P, layout, (main,), kind.device, tables=False)
        parts = {**carried, **schedule.parts}
        if mask is not None:
            parts |= mask.parts
        workspace = workspace_of(P, self._running, parts, schedule.zeros, kind.direction)
        return Decided(grids, _schedule_cells(schedule), padded_rows(P), workspace)

    def _cells(
        self,
        P: Problem,
        arrays: Sequence[Any],
        places: Sequence[int],
        schedule: Sequence[int],
        rows: int,
    ) -> list[Any]:
        """Return all cells of the parameter block: as `params.number_fields`."""
        cells, shift = self._base.copy(), self._shift
        for n, at in self._rows:
            x = arrays[n]
            (B, H, N, _), (b, h, i, _) = x.shape, x.strides
            cells[at] = b >> shift if B > 1 else 0
            cells[at + 1] = h >> shift if H > 1 else 0
            cells[at + 2] = i >> shift if N > 1 else 0
        left, right = P.window
        cells[_SIZES : _SIZES + 9] = (P.B, P.Hq, P.Hkv, P.Nq, P.Nk, *self._fixed, rows)
        cells[_SCHEDULE : _SCHEDULE + 10] = schedule
        cells[_WINDOW : _WINDOW + 5] = (
            *places,
            -1 if left is None else left,
            -1 if right is None else right,
            P.entries,
        )
        if self._split_keys:
            cells[_SPLITS] = -(-P.Nk // self._split_keys)
        cells[_SCALARS : _SCALARS + 6] = (
            P.scale,
            softcap_field(P),
            1.0 / (1.0 - P.dropout_p),
            P.scale if folds_scale(P) else 1.0,
            P.seed,
            int(P.dropout_p * 2**32),
        )
        return cells
