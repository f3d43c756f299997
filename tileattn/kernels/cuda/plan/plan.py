"""The plan of a pass: what is launched, with what, decided without a GPU."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.backward_pass import backward_launches
from tileattn.kernels.cuda.families.context import (
    KernelLaunch,
    LaunchContext,
    LearnedLaunch,
    main_of,
)
from tileattn.kernels.cuda.families.families import forward_launches
from tileattn.kernels.cuda.families.functions import Learned, functions_text
from tileattn.kernels.cuda.families.tile_lists import classify_launch, list_launches
from tileattn.kernels.cuda.plan import params
from tileattn.kernels.cuda.plan.aux_gradient import learned_arrays, learned_layouts, with_gradients
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import (
    MIN_ALIGNMENT,
    ROWS,
    ArrayLayout,
    CallLayout,
    Constant,
    contiguous,
    copies,
)
from tileattn.kernels.cuda.plan.scheduler import schedule_of
from tileattn.kernels.cuda.plan.tensor_map import TensorMap, can_map, tensor_map
from tileattn.kernels.cuda.plan.tile_kinds import TileKinds, evaluating, tile_kinds_of
from tileattn.kernels.cuda.plan.tile_lists import TileLists, tile_lists
from tileattn.kernels.cuda.plan.workspace import Workspace, workspace_of

_MAPPED = ("q", "k", "v", "dout")
_DQKV = ("dq", "dk", "dv")
_GENERIC_TILE = (
    128,
    128,
)  # by which generic kernels, whatever their tiles, skip those of a mask_mod


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What a pass launches, in order, with all but the addresses."""

    problem: Problem
    device: Device
    alignment: int  # bytes that the arrays of rows are aligned to
    launches: tuple[KernelLaunch, ...]
    fields: dict[str, Any]  # of the parameter block; those that are absent are zero
    copies_in: dict[str, ArrayLayout]  # in the workspace, read in place of the caller's arrays
    copies_out: dict[str, ArrayLayout]  # and written
    workspace: Workspace
    constants: dict[str, Constant]  # that differ from problem to problem, not from call to call
    tensor_maps: dict[tuple[tuple[str, int], ...], tuple[TensorMap, ...]]
    tile_lists: TileLists | None = None  # that kernels read, if any
    block_mask: bool = False  # whether they read the call's
    aux: dict[str, ArrayLayout] = field(default_factory=dict)  # of the caller's own functions

    def without_assignment(self) -> "LaunchPlan":
        """Let work tiles go round robin, to no more thread blocks than run together."""
        constants = {name: x for name, x in self.constants.items() if name != "assignment"}
        *before, last = self.launches
        last = last._replace(grid=min(last.grid, self.device.sm_count))
        return replace(self, launches=(*before, last), constants=constants)

    def __str__(self) -> str:
        P, gpu = self.problem, self.device
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
) -> LaunchPlan:
    """Plan the forward pass; ``launches`` of None leaves them to `forward_launches`."""
    problem, layout = _evaluated(problem, layout)
    if launches is None:
        launches = forward_launches(problem, launch_context(problem, layout, device))
    return _plan(problem, layout, device, launches, "forward")


def plan_backward(
    problem: Problem, layout: CallLayout, device: Device, *, deterministic: bool = False
) -> LaunchPlan:
    """Plan the backward pass."""
    problem, layout = _evaluated(problem, layout)
    context = launch_context(problem, layout, device)
    sinks = layout.get("dsinks") is not None
    launches = backward_launches(problem, context, deterministic=deterministic, sinks=sinks)
    return _plan(problem, layout, device, launches, "backward")


def _split_fields(
    P: Problem, arrays: Mapping[str, ArrayLayout], launches: Sequence[KernelLaunch]
) -> dict[str, int]:
    split_keys = _split_keys(launches)
    if not (P.is_paged or split_keys):
        return {}
    takes_all = not any(launch.traits.persistent for launch in launches)
    return params.split_fields(P, arrays, split_keys, takes_all=takes_all)


def _split_keys(launches: Sequence[KernelLaunch]) -> int:
    """Return the keys of a split; 0 if no kernel splits them."""
    return max((launch.traits.split_keys for launch in launches), default=0)


def _evaluated(P: Problem, layout: CallLayout) -> tuple[Problem, CallLayout]:
    mask = layout.block_mask
    if mask is None or mask.expression is None:
        return P, layout
    return evaluating(P, mask.expression), replace(layout, block_mask=None, evaluated_mask=mask)


def plans_of(problem: Problem, inputs: CallLayout, device: Device) -> tuple[LaunchPlan, ...]:
    """Plan the forward pass and both kinds of the backward one, of contiguous results."""
    forward = inputs.with_contiguous_results(problem, "forward")
    backward = with_gradients(problem, inputs.with_contiguous_results(problem, "backward"))
    return (
        plan_forward(problem, forward, device),
        *(plan_backward(problem, backward, device, deterministic=x) for x in (False, True)),
    )


def launch_context(problem: Problem, layout: CallLayout, device: Device) -> LaunchContext:
    """Say what decides about kernels besides the problem; arrays to be copied are contiguous."""
    arrays = dict(layout.arrays) | dict(copies(problem, layout))
    rows = [arrays[name] for name in ROWS & arrays.keys()]
    alignment = math.gcd(*(math.gcd(x.alignment, *x.row_strides) for x in rows))
    context = LaunchContext(
        alignment,
        device.shared_limit,
        arch=device.arch,
        dqkv=not arrays.keys().isdisjoint(_DQKV),
        tensor_maps=all(can_map(arrays[name]) for name in _MAPPED if name in arrays),
        sm_count=device.sm_count,
        tuning=device.tuning,
        mask_block_k=layout.block_mask.block_size[1] if layout.block_mask is not None else 0,
        functions=_functions_text(problem, layout),
        v_is_k=layout.v_is_k,
        learned=tuple(
            LearnedLaunch(
                *(_functions_text(problem, layout, x.element), x.heads, x.own_rows),
                *(x.copies, x.array, math.prod(x.shape)),
            )
            for x in learned_arrays(problem, layout, device.sm_count)
        ),
    )
    if "mask" in arrays:
        width = arrays["mask"].row_alignment
        width = 16 if width == 16 else 2 if width > 1 else 1
        context = context._replace(mask_vector_width=width)
    if "bias" in arrays:
        bias = arrays["bias"]
        staged = bias.row_alignment >= max(MIN_ALIGNMENT, bias.itemsize)
        context = context._replace(
            bias=bias.dtype,
            bias_shape=bias.shape,
            dbias="dbias" in arrays,
            bias_alignment_bytes=bias.row_alignment if staged else 0,
        )
    return context


def _functions_text(P: Problem, layout: CallLayout, learned: Learned | None = None) -> str:
    if not P.B * P.Hq * P.Nq * P.Nk:
        return ""
    aux = tuple((x.dtype, len(x.shape)) for x in layout.aux)
    return functions_text(P.score_mod, P.mask_mod, aux, P.accum_dtype, learned, layout.near_origin)


def _tile_kinds(
    P: Problem, layout: CallLayout, launches: Sequence[KernelLaunch]
) -> tuple[TileKinds, TileLists | None]:
    """Say what the kinds of tiles are made of, and the lists that the main kernel reads."""
    mask, main = layout.listed_mask, main_of(launches)
    if main is None or not main.traits.tile_lists:
        return tile_kinds_of(P, mask, _GENERIC_TILE), None
    backward = main.traits.persistent == "keys"
    return tile_kinds_of(P, mask, main.tile), tile_lists(P, mask, main.tile, backward=backward)


def _classifying(
    P: Problem, kinds: TileKinds, lists: TileLists | None, functions: str
) -> tuple[KernelLaunch, ...]:
    """Launch what classifies tiles on the device, and lists them."""
    b, h, rows, columns = kinds.device_shape()
    first = classify_launch(P.dtype.name, kinds.tile, functions, b * h * rows)
    if lists is None:
        return (first,)
    heads, direction = math.prod(lists.shape(None)[:2]), lists.direction
    return first, *list_launches(P.dtype.name, kinds.tile, heads, (rows, columns), direction)


def _with_late_workers(launches: Sequence[KernelLaunch], workers: int) -> Sequence[KernelLaunch]:
    (launch,) = launches
    return (launch._replace(grid=workers // launch.key.groups),)


def _plan(
    problem: Problem,
    layout: CallLayout,
    device: Device,
    launches: Sequence[KernelLaunch],
    direction: str,
) -> LaunchPlan:
    results = {"out"} if direction == "forward" else {"dsinks"}
    copied = dict(copies(problem, layout))
    functions = next((x.key.functions for x in launches if x.key.functions), "")
    arrays = dict(layout.arrays) | copied
    rows = [arrays[name].alignment for name in ROWS & arrays.keys()]
    schedule = schedule_of(problem, layout, launches, device)
    constants = {
        name: Constant.of(np.array(each, np.int64))
        for name, each in (("kv_lengths", layout.kv_lengths), ("q_offset", layout.q_offset))
        if each is not None and len(set(each)) > 1
    }
    constants |= {name: Constant.of(np.array(x, np.int64)) for name, x in layout.cu_seqlens}
    if functions:
        constants |= dict(layout.host_aux)
    if layout.origin is not None and problem.dropout_p:
        constants["origin"] = layout.origin
    if schedule.assignment is not None:
        constants["assignment"] = Constant.of(schedule.assignment)
        launches = _with_late_workers(launches, schedule.assignment.shape[1])
    if layout.block_mask is not None:
        arrays["block_kinds"] = contiguous(layout.block_mask.kinds.shape, "int32")
    made = {name: x.nbytes for name, x in copied.items()} | schedule.parts
    learned = learned_layouts(layout, learned_arrays(problem, layout, device.sm_count))
    sums = {name: x.nbytes for name, x in learned.items() if layout.get(name) is None}
    sums |= schedule.zeros
    aux = layout.aux_by_name | learned if functions else {}
    kinds, lists = _tile_kinds(problem, layout, launches)
    if functions and problem.mask_mod is not None and not _split_keys(launches):
        if kinds.on_device:
            arrays["tile_kinds"] = contiguous(kinds.device_shape(), "int8")
            made["tile_kinds"] = arrays["tile_kinds"].nbytes
            launches = (*_classifying(problem, kinds, lists, functions), *launches)
        else:
            known = kinds.kinds(layout.evaluated_mask)
            arrays["tile_kinds"] = contiguous(known.shape, "int8")
            constants["tile_kinds"] = Constant.of(known)
    if lists is not None:
        arrays["tile_list"] = contiguous(lists.shape(layout.listed_mask), "int32")
        if lists.on_device:
            made |= lists.workspace()
        elif layout.block_mask is None:
            constants["tile_list"] = Constant.of(lists.lists(layout.evaluated_mask))
    return LaunchPlan(
        problem,
        device,
        min(rows),
        tuple(launches),
        params.fields(problem, layout, arrays, schedule.fields)
        | _split_fields(problem, arrays, launches)
        | dict(zip(("kinds_tile_q", "kinds_tile_k"), kinds.tile, strict=True)),
        {name: x for name, x in copied.items() if name not in results},
        {name: x for name, x in copied.items() if name in results},
        workspace_of(problem, launches, made, sums, direction),
        constants,
        {
            boxes: tuple(tensor_map(name, arrays[name], rows) for name, rows in boxes)
            for boxes in dict.fromkeys(launch.tensor_maps for launch in launches)
            if boxes
        },
        lists,
        layout.block_mask is not None,
        aux,
    )
