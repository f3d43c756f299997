"""What calls of one kind have in common: their kernels, with grids left open."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tileattn.call.problem import Kind, Problem
from tileattn.kernels.cuda.families.backward_pass import backward_launches
from tileattn.kernels.cuda.families.context import (
    KernelLaunch,
    LaunchContext,
    LearnedLaunch,
    main_of,
)
from tileattn.kernels.cuda.families.cuda_text import Learned, functions_text
from tileattn.kernels.cuda.families.families import forward_launches
from tileattn.kernels.cuda.families.query_splits import query_splits
from tileattn.kernels.cuda.families.size_class import (
    FEW_ROWS,
    MOST_ROWS,
    WHOLE,
    fills_tiles,
    has_keys,
    has_queries,
    size_class,
)
from tileattn.kernels.cuda.plan.aux_gradient import learned_arrays
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.layout import (
    INTEGERS,
    MIN_ALIGNMENT,
    ROWS,
    ArrayLayout,
    CallLayout,
    copies,
)
from tileattn.kernels.cuda.plan.tensor_map import can_map
from tileattn.kernels.cuda.plan.tile_lists import classify_launch, list_launches

_MAPPED = ("q", "k", "v", "dout")
_DQKV = frozenset({"dq", "dk", "dv"})
MAX_ENTRY_COPIES = 1 << 29  # bytes of all copies of dbias, one for each batch entry
_GENERIC_TILE = (128, 128)  # tile by which generic kernels skip what a mask_mod leaves empty


@dataclass(frozen=True, slots=True)
class KindPlan:
    """What a pass launches, whatever the numbers of the call are.

    Calls of the same kind, context, device and `size_class` have equal ones, if they also agree in
    the dtypes of integers and in whether dsinks is wanted. A `LaunchPlan` adds the numbers of a
    call (`tileattn.kernels.cuda.plan.plan.launch_plan`).

    Parameters
    ----------
    kind : Kind
        dtype, head dimensions, options, expressions.
    context : LaunchContext
        What the arrays decide about kernels: alignments, dtypes, text of the functions.
    device : Device
        The GPU.
    direction : str
        ``"forward"`` or ``"backward"``.
    launches : tuple of KernelLaunch
        In order, with open grids. One runs only if its grid says so.
    classifying : tuple of KernelLaunch
        What runs before these if the device classifies the tiles of a ``mask_mod``.
    fields : dict of str to int
        Fields of the parameter block that no number changes.
    functions : str
        CUDA text of the caller's own functions; empty if no kernel has any.
    mask_tile : (int, int)
        Queries and keys of the tiles that masks leave empty, partial or full.
    """

    kind: Kind
    context: LaunchContext
    device: Device
    direction: Literal["forward", "backward"]
    launches: tuple[KernelLaunch, ...]
    classifying: tuple[KernelLaunch, ...]
    fields: dict[str, int]
    functions: str
    mask_tile: tuple[int, int]

    @property
    def main(self) -> KernelLaunch | None:
        """The launch whose tile and schedule stand for the pass."""
        return main_of(self.launches)

    def splits(self, problem: Problem) -> int:
        """Count the work tiles that share a key block."""
        main = self.main
        if main is None or not main.key.split_q:
            return 1
        heads, queries = query_splits(problem, self.device.tuning)
        return heads * queries


def forward_kind(
    problem: Problem,
    layout: CallLayout,
    device: Device,
    launches: Sequence[KernelLaunch] | None = None,
) -> KindPlan:
    """Choose the kernels of the forward pass; ``launches`` of None are `forward_launches`."""
    context = launch_context(problem, layout, device)
    if launches is None:
        launches = forward_launches(problem, context)
    return _kind_plan(problem, layout, device, context, "forward", launches)


def backward_kind(
    problem: Problem, layout: CallLayout, device: Device, *, deterministic: bool
) -> KindPlan:
    """Choose the kernels of the backward pass."""
    context = launch_context(problem, layout, device)
    sinks = layout.get("dsinks") is not None
    launches = backward_launches(problem, context, deterministic=deterministic, sinks=sinks)
    return _kind_plan(problem, layout, device, context, "backward", launches)


def _kind_plan(
    P: Problem,
    layout: CallLayout,
    device: Device,
    context: LaunchContext,
    direction: Literal["forward", "backward"],
    launches: Sequence[KernelLaunch],
) -> KindPlan:
    main = main_of(launches)
    lists = main is not None and main.traits.tile_lists
    tile = main.tile if main is not None and lists else _GENERIC_TILE
    functions = next((x.key.functions for x in launches if x.key.functions), "")
    split_keys = min((x.traits.split_keys for x in launches if x.traits.split_keys), default=0)
    classifying: tuple[KernelLaunch, ...] = ()
    if functions and P.mask_mod is not None and not split_keys:
        classifying = (classify_launch(P.dtype.name, tile, functions, P.mask_mod),)
        # A left limit leaves few tiles of the backward pass without lists.
        if lists and (direction == "forward" or P.window[0] is None):
            classifying += list_launches(P.dtype.name, tile, direction)
    fields = {"D": P.D, "Dv": P.Dv, "group": P.group}
    fields["kinds_tile_q"], fields["kinds_tile_k"] = tile
    for name, x in layout.arrays:
        if name in INTEGERS:
            fields[f"{name}_bytes"] = 4 if x.dtype == "int32" else 8
            if name == "block_table" and P.page is not None:
                fields["page"] = P.page
    fields |= {f"{name}_rows": 1 for name in P.token_descales}
    part_keys = 0 if main is None else main.traits.part_keys
    if P.is_paged or split_keys or part_keys:
        # Packed sequences with many rows are split as well, unless another kernel takes those.
        few = any(launch.traits.persistent for launch in launches)
        fields["split_keys"] = keys = split_keys or part_keys or WHOLE
        for name in ("piece_keys", "group_keys"):
            fields[name] = max((getattr(x.traits, name) for x in launches), default=0) or keys
        fields["max_split_rows"] = 0 if part_keys else FEW_ROWS if few else MOST_ROWS
    own = tuple(launches)
    return KindPlan(P.kind, context, device, direction, own, classifying, fields, functions, tile)


class ArrayFacts(NamedTuple):
    """What the arrays of a call decide about kernels; the fields are as in `LaunchContext`."""

    alignment_bytes: int
    tensor_maps: bool
    dqkv: bool
    v_is_k: bool
    mask_block_k: int
    mask_vector_width: int = 1
    bias: str = ""
    full_bias: bool = False
    entry_copies: bool = False
    dbias: bool = False
    bias_alignment_bytes: int = 0


def kind_key(problem: Problem, layout: CallLayout, device: Device) -> tuple[Any, ...]:
    """Return what decides about the kernels of a pass among calls of one kind of validation.

    The calls agree in dtypes, options, functions, device and wanted results.
    """
    P = problem
    left, right = P.window
    learned = learned_arrays(P, layout, device.sm_count)
    return (
        *(P.D, P.Dv, P.group, P.page, left is None, right is None, layout.near_origin),
        P.token_descales,
        None if layout.evaluated_mask is None else P.mask_mod,
        tuple([(x.element, x.own_rows, x.array) for x in learned]) if learned else (),
        array_facts(P, layout),
        size_class(P, device.tuning, device.sm_count),
    )


def array_facts(P: Problem, layout: CallLayout) -> ArrayFacts:
    """Return what the arrays decide about kernels; arrays to be copied are contiguous."""
    arrays = dict(layout.arrays)
    arrays.update(copies(P, layout))
    bits, dqkv = 0, False
    for name, x in arrays.items():
        if name in ROWS:
            bits |= x.alignment
            for n, stride in zip(x.shape, x.strides[:-1], strict=False):
                if n > 1:
                    bits |= stride
            dqkv = dqkv or name in _DQKV
    mask = layout.block_mask
    return ArrayFacts(
        bits & -bits,
        all(can_map(arrays[name]) for name in _MAPPED if name in arrays),
        dqkv,
        layout.v_is_k,
        mask.block_size[1] if mask is not None else 0,
        **pair_facts(P, arrays),
    )


def pair_facts(P: Problem, arrays: Mapping[str, ArrayLayout]) -> dict[str, Any]:
    """Return what the ``mask`` and the ``bias`` of a call decide about kernels."""
    facts: dict[str, Any] = {}
    if "mask" in arrays:
        width = arrays["mask"].row_alignment
        facts["mask_vector_width"] = 16 if width == 16 else 2 if width > 1 else 1
    if "bias" in arrays:
        bias = arrays["bias"]
        width = bias.row_alignment
        facts["bias"] = bias.dtype
        facts["full_bias"] = bias.shape == (P.B, P.Hq, P.Nq, P.Nk)
        facts["entry_copies"] = _entry_copies(P, bias)
        facts["dbias"] = "dbias" in arrays
        staged = width >= max(MIN_ALIGNMENT, bias.itemsize)
        facts["bias_alignment_bytes"] = width if staged else 0
    return facts


def _entry_copies(P: Problem, bias: ArrayLayout) -> bool:
    """Return True if dbias can be the sum of a copy for each batch entry.

    The generic kernel over keys writes them if no tile is empty. It has dS of every pair in the
    accumulation dtype.
    """
    if bias.shape != (1, P.Hq, P.Nq, P.Nk) or not bias.dtype == P.dtype.name == P.accum_dtype.name:
        return False
    return P.B > 1 and fills_tiles(P) and P.B * bias.nbytes <= MAX_ENTRY_COPIES


def launch_context(problem: Problem, layout: CallLayout, device: Device) -> LaunchContext:
    """Return what the arrays, the functions and the GPU decide about kernels."""
    P = problem
    return LaunchContext(
        shared_limit=device.shared_limit,
        arch=device.arch,
        sm_count=device.sm_count,
        tuning=device.tuning,
        functions=_functions_text(P, layout),
        learned=tuple(
            LearnedLaunch(_functions_text(P, layout, x.element), x.own_rows, x.array)
            for x in learned_arrays(P, layout, device.sm_count)
        ),
        **array_facts(P, layout)._asdict(),
    )


def _functions_text(P: Problem, layout: CallLayout, learned: Learned | None = None) -> str:
    if not (has_queries(P) and has_keys(P)):
        return ""
    aux = tuple((x.dtype, len(x.shape)) for x in layout.aux)
    return functions_text(P.score_mod, P.mask_mod, aux, P.accum_dtype, learned, layout.near_origin)
