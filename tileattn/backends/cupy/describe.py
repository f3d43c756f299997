"""What a plan needs to know of CuPy devices and arrays."""

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from tileattn.call.problem import Operands
from tileattn.call.sequences import Places
from tileattn.kernels.cuda.jit.load import arch_of
from tileattn.kernels.cuda.plan.device import Device
from tileattn.kernels.cuda.plan.host_arrays import host_arrays
from tileattn.kernels.cuda.plan.layout import CallLayout, array_layout
from tileattn.kernels.cuda.plan.params import aux_name
from tileattn.kernels.cuda.tuning import tuning_of


@functools.cache
def device_of(ordinal: int) -> Device:
    """Describe a device by its number."""
    from cupy.cuda import runtime

    def attribute(name: str) -> int:
        value: int = runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), ordinal)
        return value

    return Device(
        runtime.getDeviceProperties(ordinal)["name"].decode(),
        arch_of(ordinal),
        attribute("MultiProcessorCount"),
        attribute("MaxSharedMemoryPerBlockOptin"),
        attribute("L2CacheSize"),
        tuning_of(arch_of(ordinal)),
    )


def inputs_of(operands: Operands) -> dict[str, Any]:
    """Name the arrays of a call as the parameter block does; those on the host are left out."""
    x = operands
    arrays = {"q": x.q, "k": x.k, "v": x.v}
    for name, array in Places.of(x).integers.items():
        if name == "block_table":
            arrays[name] = on_device(array)
        elif type(array) is not np.ndarray:
            arrays[name] = array
    arrays |= x.descales | x.option_arrays
    return arrays | {aux_name(n): a for n, a in enumerate(x.aux) if type(a) is not np.ndarray}


def on_device(x: Any) -> Any:
    """Copy a host array to the current device; leave other arrays where they are."""
    import cupy

    return cupy.asarray(x) if type(x) is np.ndarray else x


def addresses_of(arrays: Mapping[str, Any], device: int) -> dict[str, int]:
    """Return the addresses of arrays by name; raise ValueError for one on another device."""
    found = {}
    for name, x in arrays.items():
        memory = x.data
        if memory.device_id != device:
            refuse_device(name, memory.device_id, device)
        found[name] = memory.ptr
    return found


def refuse_device(name: str, there: int, device: int) -> NoReturn:
    """Raise ValueError for an array on another device than the current one."""
    raise ValueError(
        f"{name} must be on CuPy's current device, {device}; it is on device {there} "
        f"(call within `with cupy.cuda.Device({there}):`, or copy it)"
    )


def layout_of(arrays: Mapping[str, Any], operands: Operands) -> CallLayout:
    """Describe the arrays of a call, and its values on the host."""
    lengths, offsets = (
        tuple(x.tolist()) if type(x) is np.ndarray else None
        for x in (operands.kv_lengths, operands.q_offset)
    )
    layouts = tuple((name, array_layout(x, x.data.ptr)) for name, x in arrays.items())
    packing = {} if operands.packing is None else operands.packing._asdict()
    ends = ((name, tuple(x.tolist())) for name, x in packing.items() if type(x) is np.ndarray)
    return CallLayout(
        *(layouts, lengths, offsets, operands.block_mask),
        cu_seqlens=tuple(ends),
        v_is_k=is_view(arrays["k"], arrays["v"]),
        **host_arrays(operands),
    )


def is_view(k: Any, v: Any) -> bool:
    """Return True if v is the first columns of k: latent attention loads those once."""
    return bool(
        v.data.ptr == k.data.ptr
        and v.shape[:-1] == k.shape[:-1]
        and v.shape[-1] <= k.shape[-1]
        and v.strides == k.strides
    )
