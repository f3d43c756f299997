"""Fill the numbers of a new call into a plan of its kind, by arithmetic alone.

`launch_plan` describes a call in full: its result can be printed, compared and explained. A
`Filler` is made from one such plan, and finds what differs for other numbers in a fraction of the
time. A test holds that both agree.
"""

from collections.abc import Mapping, Sequence, Set
from operator import attrgetter
from typing import Any, NamedTuple

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.ds_tiles import dbias_copies
from tileattn.kernels.cuda.families.float32 import PLANE_BYTES
from tileattn.kernels.cuda.families.grid import GridSizes, padded_rows
from tileattn.kernels.cuda.plan.layout import ITEMSIZES, ROWS, CallLayout
from tileattn.kernels.cuda.plan.params import CELLS, ON_DEVICE, PACKED, SECTIONS, scalar_fields
from tileattn.kernels.cuda.plan.plan import WORD, LaunchPlan, MaskTiles, mask_tiles
from tileattn.kernels.cuda.plan.planes import plane_layouts
from tileattn.kernels.cuda.plan.scheduler import Schedule, schedule_of
from tileattn.kernels.cuda.plan.tensor_map import sizes_and_strides
from tileattn.kernels.cuda.plan.workspace import Workspace, workspace_of

# First cells of sections, and of fields that are next to each other.
_SIZES, _SCHEDULE, _WINDOW = CELLS["B"], CELLS["single_heads"], CELLS["length"]
_SPLITS, _SCALARS, _BIAS = CELLS["splits"], CELLS["scale"], CELLS["bias_B"]
_schedule_cells = attrgetter(*(name for name, _ in SECTIONS["schedule"]))
_SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3}  # to divide by the size of an element

PLACES = {"kv_lengths": "length", "q_offset": "offset"}
"""The cells of lengths and offsets that all sequences share."""

ENDS = ("cu_seqlens_q", "cu_seqlens_k")
"""Offsets of packed sequences."""

_ALIKE, _DIFFERENT = (0,), (0, 1)  # stand for lengths and offsets in a layout

PAIRS = frozenset({"bias", "dbias", "mask"})
"""Arrays of pairs of a query and a key."""

# Arrays that a filler describes; of those that are contiguous kernels read no strides.
_CONTIGUOUS = {"lse", *PLACES, *ENDS, "alibi_slopes", "sinks", "dsinks"}
FILLED = ROWS | PAIRS | _CONTIGUOUS


class Place(NamedTuple):
    """The lengths or the offsets of all sequences of a call, as the host knows them.

    Parameters
    ----------
    value : int
        The one that all sequences share.
    differing : int
        Number of sequences if they differ: then the call carries them to its workspace. 0 else.
    """

    value: int
    differing: int = 0


class Filled(NamedTuple):
    """What the numbers of a call decide, besides the addresses.

    Parameters
    ----------
    cells : list of number
        The parameter block with null addresses, and the cells of functions. Those of their captured
        numbers are 0.
    grids : sequence of int
        Thread blocks of each launch.
    workspace : Workspace
        Memory that the pass needs besides its results.
    maps : list of int
        Four sizes, then three strides, of each tensor map.
    """

    cells: list[Any]
    grids: Sequence[int]
    workspace: Workspace
    maps: list[int]


def can_fill(plan: LaunchPlan, names: Set[str]) -> bool:
    """Return True if a plan has only arrays of `FILLED` and arrays that functions read.

    It has no copies, tables or pages, and sums no gradients of these arrays.
    """
    tables = plan.constants or plan.block_mask or plan.problem.is_paged
    others = plan.copies_in or plan.copies_out or not plan.carried.keys() <= {*PLACES, *ENDS}
    others = others or not plan.aux.keys() <= names
    has_main = any(launch.traits.main for launch in plan.launches)
    return has_main and not (tables or others) and names <= FILLED | plan.aux.keys()


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
        self._kind, self._names = plan.kind, names
        kind, running = plan.kind, {id(launch.key) for launch in plan.launches}
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
        self._itemsize = plan.problem.dtype.itemsize
        self._shift = _SHIFTS[self._itemsize]
        shifts = dict.fromkeys(ROWS, self._shift) | {"mask": 0}
        if kind.context.bias:
            shifts |= dict.fromkeys(("bias", "dbias"), _SHIFTS[ITEMSIZES[kind.context.bias]])
        self._strides = [
            (n, CELLS[f"{name}_at"], 4 if name in PAIRS else 3, shifts[name])
            for n, name in enumerate(names)
            if name in shifts
        ]
        self._slopes, self._bias = (
            names.index(name) if name in names else None for name in ("alibi_slopes", "bias")
        )
        self._mapped = [name for boxes in plan.tensor_maps for name, _ in boxes]
        self._planes = tuple(plane_layouts(plan.problem, plan.launches))
        self._aux, self._constants = [names.index(name) for name in plan.aux], len(plan.cells)

    def fill(
        self,
        P: Problem,
        places: Sequence[Place | None],
        arrays: Sequence[Any],
        ends: Mapping[str, int] | None = None,
    ) -> Filled | None:
        """Return what a call decides; None if it runs other kernels than the plan.

        ``places`` are lengths and offsets; None for those that the host does not know. ``arrays``
        have shapes and strides, in the order of the names. ``ends`` are the bytes of the offsets
        of packed sequences that the call carries to its workspace.
        """
        kind, mask = self._kind, None
        lengths, offsets = (x and (_DIFFERENT if x.differing else _ALIKE) for x in places)
        layout = CallLayout((), lengths, offsets)
        if kind.classifying:
            mask = mask_tiles(kind, P, layout, tables=False)
        carried = {
            n: x.differing * WORD for n, x in zip(PLACES, places, strict=True) if x and x.differing
        }
        bias = () if self._bias is None else arrays[self._bias].shape
        decided = self._decided(P, layout, mask, {**carried, **(ends or {})}, bias)
        if decided is None:
            return None
        grids, schedule, workspace, copies = decided
        cells, size = self._base.copy(), self._itemsize
        for n, at, axes, shift in self._strides:
            cells[at : at + axes] = _elements(arrays[n], shift, axes)
        if bias:
            cells[_BIAS : _BIAS + 5] = (*bias, copies)
        if self._slopes is not None:
            (sequences, heads), at = arrays[self._slopes].shape, CELLS["alibi_slopes_b"]
            cells[at] = heads if sequences > 1 else 0
        if mask is not None:
            for name, x in mask.arrays.items():
                at = CELLS[f"{name}_at"]
                cells[at : at + 4] = x.elements
        left, right = P.window
        cells[_SIZES : _SIZES + 9] = (P.B, P.Hq, P.Hkv, P.Nq, P.Nk, *self._fixed, padded_rows(P))
        cells[_SCHEDULE : _SCHEDULE + len(SECTIONS["schedule"])] = _schedule_cells(schedule)
        cells[_WINDOW : _WINDOW + 5] = (
            *map(self._place_cell, PLACES.items(), places),
            -1 if left is None else left,
            -1 if right is None else right,
            P.entries,
        )
        if self._split_keys:
            cells[_SPLITS] = -(-P.Nk // self._split_keys)
        cells[_SCALARS : _SCALARS + 6] = scalar_fields(P)
        cells += [0] * self._constants
        for n in self._aux:
            cells += (0, *(arrays[n].shape or (0,)), *(arrays[n].strides or (0,)))
        maps: list[int] = []
        named = dict(zip(self._names, arrays, strict=True)) if self._mapped else {}
        if self._planes:
            named |= plane_layouts(P, self._running)
        for name in self._mapped:
            itemsize = PLANE_BYTES if name in self._planes else size
            for numbers in sizes_and_strides(named[name], itemsize):
                maps += numbers
        return Filled(cells, grids, workspace, maps)

    def _place_cell(self, names: tuple[str, str], place: Place | None) -> Any:
        """Return the cell of the length or the offset that all sequences share."""
        name, cell = names
        if place is None:
            return 0 if name in self._names else ON_DEVICE[cell]
        return 0 if place.differing else place.value

    def _decided(
        self,
        P: Problem,
        layout: CallLayout,
        mask: MaskTiles | None,
        carried: Mapping[str, int],
        bias: tuple[int, ...],
    ) -> tuple[Sequence[int], Schedule, Workspace, int] | None:
        """Return what follows from the problem, the copies of dbias last.

        None if it runs other kernels than the plan.
        """
        kind = self._kind
        sizes = GridSizes(P, bias, splits=kind.splits(P))
        if mask is not None:
            if bool(mask.launches) is not self._classifies:
                return None
            sizes = sizes._replace(mask_lines=mask.lines)
        grids = []
        for rule, runs in self._rules:
            grid = rule.thread_blocks(sizes)
            if (grid is not None) is not runs:
                return None
            if grid is not None:
                grids.append(grid)
        main = KernelLaunch(*self._main, grids[self._place])
        schedule = schedule_of(P, layout, (main,), kind.device, tables=False)
        copies, dbias_parts = dbias_copies(kind.launches, sizes)
        parts = {**carried, **schedule.parts, **(mask.parts if mask is not None else {})}
        parts |= dbias_parts
        workspace = workspace_of(P, self._running, parts, schedule.zeros, kind.direction)
        return grids, schedule, workspace, copies


def _elements(x: Any, shift: int, axes: int) -> list[int]:
    """Return strides in elements, as `ArrayLayout.elements`."""
    known = zip(x.shape[:axes], x.strides, strict=False)
    return [stride >> shift if n > 1 else 0 for n, stride in known]
