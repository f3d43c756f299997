"""The plan of a pass: what is launched, with what, decided without a GPU.

The kind of a call decides which kernels run (`KindPlan`); its numbers decide the rest
(`launch_plan`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.context import KernelLaunch
from tileattn.kernels.cuda.families.ds_tiles import dbias_copies
from tileattn.kernels.cuda.families.grid import GridSizes
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.plan import params
from tileattn.kernels.cuda.plan.aux_gradient import learned_arrays, learned_layouts, with_gradients
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.kind_plan import KindPlan, backward_kind, forward_kind
from tileattn.kernels.cuda.plan.layout import ArrayLayout, CallLayout, Constant, contiguous, copies
from tileattn.kernels.cuda.plan.planes import plane_layouts
from tileattn.kernels.cuda.plan.scheduler import schedule_of
from tileattn.kernels.cuda.plan.tensor_map import TensorMap, tensor_map
from tileattn.kernels.cuda.plan.tile_kinds import evaluating, tile_kinds_of
from tileattn.kernels.cuda.plan.tile_lists import TileLists, tile_lists
from tileattn.kernels.cuda.plan.workspace import Workspace, workspace_of

WORD = 8  # bytes; unit in which carried arrays are written
STORE = KernelKey("store_values", "float32")  # writes them
MAX_CARRIED = 36 << 10  # bytes of an array that calls carry: lengths of 4,096 sequences, and more


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What a pass launches: everything but the addresses.

    Parameters
    ----------
    kind : KindPlan
        What the call shares with others of its kind.
    problem : Problem
        The call.
    launches : tuple of KernelLaunch
        In order, with their grids.
    fields : dict of str to number
        Fields of the parameter block; absent ones are zero.
    copies_in, copies_out : dict of str to ArrayLayout
        Contiguous copies in the workspace, read or written in place of the caller's arrays.
    workspace : Workspace
        Memory that the pass needs besides its results.
    constants : dict of str to Constant
        Arrays of the host that are uploaded once, for all calls of the plan.
    carried : dict of str to Constant
        Arrays of the host that each call writes to its workspace.
    tensor_maps : dict
        Tensor maps of each launch, by `KernelLaunch.tensor_maps`.
    tile_lists : TileLists or None
        Lists of tiles that the kernels read.
    block_mask : bool
        True if the kernels read the call's block mask.
    aux : dict of str to ArrayLayout
        Arrays of the caller's own functions.
    cells : tuple of int
        Cells that these functions read.
    is_provisional : bool
        True if it was made without tables, and a plan with tables may be faster.
    """

    kind: KindPlan
    problem: Problem
    launches: tuple[KernelLaunch, ...]
    fields: dict[str, Any]
    copies_in: dict[str, ArrayLayout]
    copies_out: dict[str, ArrayLayout]
    workspace: Workspace
    constants: dict[str, Constant]
    carried: dict[str, Constant]
    tensor_maps: dict[tuple[tuple[str, int], ...], tuple[TensorMap, ...]]
    tile_lists: TileLists | None
    block_mask: bool
    aux: dict[str, ArrayLayout]
    cells: tuple[int, ...]
    is_provisional: bool = False

    def __str__(self) -> str:
        P, gpu = self.problem, self.kind.device
        lines = [
            f"problem    {P.dtype.name}, B {P.B}, Hq {P.Hq}, Hkv {P.Hkv}, Nq {P.Nq}, Nk {P.Nk}, "
            f"D {P.D}, Dv {P.Dv}",
            f"device     {gpu.name}, {gpu.arch}, {gpu.sm_count} SMs",
        ]
        for launch in self.launches:
            lines += [f"launch     {launch_line(launch)}", f"           because {launch.why}"]
        values = (f"{name} {value}" for name, value in self.fields.items())
        lines.append(f"fields     {', '.join(values)}")
        parts = (f"{name} at {start:,}" for name, start in self.workspace.starts.items())
        if self.workspace.nbytes:
            lines.append(f"workspace  {self.workspace.nbytes:,} bytes: {', '.join(parts)}")
        copied = self.copies_in | self.copies_out
        lines += (f"copy       {name} {x.dtype} {x.shape}" for name, x in copied.items())
        lines += (f"upload     {name} {x.dtype} {x.shape}" for name, x in self.constants.items())
        lines += (f"carry      {name} {x.dtype} {x.shape}" for name, x in self.carried.items())
        maps = {one: None for made in self.tensor_maps.values() for one in made}
        lines += (f"TMA        {one}" for one in maps)
        return "\n".join(lines)


def launch_line(launch: KernelLaunch) -> str:
    """Describe a launch in a few words."""
    key = launch.key
    q, k = launch.tile
    groups = f", {key.groups} groups" if key.groups > 1 else ""
    return (
        f"{key.kernel} {q} x {k}, {key.head_dim}/{key.value_dim} columns, {key.stages} stages"
        f"{groups}: {launch.grid:,} blocks of {key.threads} threads"
    )


def plan_forward(
    problem: Problem,
    layout: CallLayout,
    device: Device,
    launches: Sequence[KernelLaunch] | None = None,
    *,
    tables: bool = True,
) -> LaunchPlan:
    """Plan the forward pass; ``launches`` of None leaves them to the kernel families."""
    problem, layout = evaluated(problem, layout)
    kind = forward_kind(problem, layout, device, launches)
    return launch_plan(kind, problem, layout, tables=tables)


def plan_backward(
    problem: Problem,
    layout: CallLayout,
    device: Device,
    *,
    deterministic: bool = False,
    tables: bool = True,
) -> LaunchPlan:
    """Plan the backward pass."""
    problem, layout = evaluated(problem, layout)
    kind = backward_kind(problem, layout, device, deterministic=deterministic)
    return launch_plan(kind, problem, layout, tables=tables)


def evaluated(P: Problem, layout: CallLayout) -> tuple[Problem, CallLayout]:
    """Let kernels evaluate a block mask that is an expression, pair by pair."""
    mask = layout.block_mask
    if mask is None or mask.expression is None:
        return P, layout
    return evaluating(P, mask.expression), layout._replace(block_mask=None, evaluated_mask=mask)


def plans_of(
    problem: Problem, inputs: CallLayout, device: Device, *, tables: bool = True
) -> tuple[LaunchPlan, ...]:
    """Plan the forward pass and both kinds of the backward one, of contiguous results."""
    forward = inputs.with_contiguous_results(problem, "forward")
    backward = with_gradients(problem, inputs.with_contiguous_results(problem, "backward"))
    return (
        plan_forward(problem, forward, device, tables=tables),
        *(
            plan_backward(problem, backward, device, deterministic=x, tables=tables)
            for x in (False, True)
        ),
    )


def launch_plan(
    kind: KindPlan, problem: Problem, layout: CallLayout, *, tables: bool = True
) -> LaunchPlan:
    """Fill the numbers of a problem into the plan of its kind.

    ``layout`` has the numbers of the arrays: sizes, strides, lengths and offsets. With ``tables``
    the host assigns work tiles and lists the tiles of a ``mask_mod``, in milliseconds that grow
    with the lengths. Without, the device orders and lists tiles in each call. The results have the
    same bits.
    """
    P, device = problem, kind.device
    copied = dict(copies(P, layout))
    arrays = dict(layout.arrays) | copied
    mask = mask_tiles(kind, P, layout, tables=tables)
    found = learned_arrays(P, layout, device.sm_count)
    learned = learned_layouts(layout, found)
    sizes = GridSizes(
        P,
        arrays["bias"].shape if "bias" in arrays else (),
        tuple(x.heads * x.copies for x in found),
        {x.array: math.prod(x.shape) for x in found},
        mask.lines,
        kind.splits(P),
    )
    dbias, dbias_parts = dbias_copies(kind.launches, sizes)
    launches = with_grids((*mask.launches, *kind.launches), sizes)
    schedule = schedule_of(P, layout, launches, device, tables=tables)
    constants = _constants(kind, P, layout)
    if schedule.assignment is not None:
        constants["assignment"] = Constant.of(schedule.assignment)
        workers = schedule.assignment.shape[1]  # with late ones
        launches = tuple(
            x._replace(grid=workers // x.key.groups) if x.traits.main else x for x in launches
        )
    constants |= mask.constants
    carried = {} if tables else {n: x for n, x in constants.items() if len(x.data) <= MAX_CARRIED}
    arrays |= mask.arrays
    mapped = arrays | plane_layouts(P, launches)
    made = {name: x.nbytes for name, x in copied.items()}
    made |= {name: -(-len(x.data) // WORD) * WORD for name, x in carried.items()}
    made |= {**schedule.parts, **mask.parts, **dbias_parts}
    sums = {name: x.nbytes for name, x in learned.items() if layout.get(name) is None}
    results = {"out"} if kind.direction == "forward" else {"dsinks"}
    return LaunchPlan(
        kind=kind,
        problem=P,
        launches=launches,
        fields={
            **kind.fields,
            **params.number_fields(P, layout, arrays, schedule.fields),
            **params.split_fields(P, arrays, kind.fields),
            "dbias_copies": dbias,
        },
        copies_in={name: x for name, x in copied.items() if name not in results},
        copies_out={name: x for name, x in copied.items() if name in results},
        workspace=workspace_of(P, launches, made, sums | schedule.zeros, kind.direction),
        constants={name: x for name, x in constants.items() if name not in carried},
        carried=carried,
        tensor_maps={
            boxes: tuple(tensor_map(name, mapped[name], rows) for name, rows in boxes)
            for boxes in dict.fromkeys(launch.tensor_maps for launch in launches)
            if boxes
        },
        tile_lists=mask.lists,
        block_mask=layout.block_mask is not None,
        aux=layout.aux_by_name | learned if kind.functions else {},
        cells=params.constant_cells(P) if kind.functions else (),
        is_provisional=schedule.is_provisional or mask.is_provisional or bool(carried),
    )


class MaskTiles(NamedTuple):
    """The part of a plan that follows from masks: kinds of tiles, lists of tiles."""

    launches: tuple[KernelLaunch, ...]  # classify tiles on the device, and list them
    lines: tuple[int, int, int]  # as in `GridSizes`
    arrays: dict[str, ArrayLayout]
    parts: dict[str, int]  # bytes of the workspace
    constants: dict[str, Constant]
    lists: TileLists | None
    is_provisional: bool


def mask_tiles(kind: KindPlan, P: Problem, layout: CallLayout, *, tables: bool) -> MaskTiles:
    """Decide how masks leave out tiles in a pass."""
    mask, main, tile = layout.listed_mask, kind.main, kind.mask_tile
    kinds, lists = tile_kinds_of(P, mask, tile, tables=tables), None
    if main is not None and main.traits.tile_lists:
        lists = tile_lists(P, kinds, mask, backward=kind.direction == "backward")
    launches: tuple[KernelLaunch, ...] = ()
    lines = 0, 0, 0
    arrays: dict[str, ArrayLayout] = {}
    parts: dict[str, int] = {}
    constants: dict[str, Constant] = {}
    if layout.block_mask is not None:
        arrays["block_kinds"] = contiguous(layout.block_mask.kinds.shape, "int32")
    shape = () if lists is None else lists.shape(mask)
    if kind.classifying and kinds.on_device:
        b, h, rows, columns = kinds.device_shape()
        heads = math.prod(shape[:2]) if shape else 0
        launches, lines = kind.classifying, (b * h * rows, heads * rows, heads * columns)
        arrays["tile_kinds"] = contiguous((b, h, rows, columns), "int8")
        parts["tile_kinds"] = b * h * rows * columns
    elif kind.classifying and (kinds.decided or layout.evaluated_mask is not None):
        constants["tile_kinds"] = known = kinds.constant(layout.evaluated_mask)
        arrays["tile_kinds"] = contiguous(known.shape, "int8")
    if lists is not None:
        arrays["tile_list"] = contiguous(shape, "int32")
        if lists.on_device:
            parts |= lists.workspace(shape)
        elif layout.block_mask is None:
            constants["tile_list"] = lists.constant(layout.evaluated_mask)
    return MaskTiles(launches, lines, arrays, parts, constants, lists, kinds.is_provisional)


def with_grids(launches: Iterable[KernelLaunch], sizes: GridSizes) -> tuple[KernelLaunch, ...]:
    """Fill in the grids, and leave out kernels that do not run at these sizes."""
    counted = [(launch, launch.blocks.thread_blocks(sizes)) for launch in launches]
    return tuple([KernelLaunch(*launch[:-1], n) for launch, n in counted if n is not None])


def _constants(kind: KindPlan, P: Problem, layout: CallLayout) -> dict[str, Constant]:
    """Return the lengths, offsets and arrays of the host that the kernels read."""
    each = (("kv_lengths", layout.kv_lengths), ("q_offset", layout.q_offset))
    differing = [(name, x) for name, x in each if x is not None and len(set(x)) > 1]
    found = {
        name: Constant.of(np.array(x, np.int64)) for name, x in (*differing, *layout.cu_seqlens)
    }
    if kind.functions:
        found |= dict(layout.host_aux)
    if layout.origin is not None and P.dropout_p:
        found["origin"] = layout.origin
    return found
