"""Arrays that stand for those of a device: they refuse what waits for one, or copies silently."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.lib.mixins import NDArrayOperatorsMixin

from tileattn.backends import registry
from tileattn.backends.numpy.backend import NumpyBackend

OFFERED = {np.broadcast_to, np.arange, np.asarray, np.empty_like, np.searchsorted}


class DeviceArray(NDArrayOperatorsMixin):
    """An array that is no NumPy array, and whose values the host never asks for.

    As with CuPy, operators take no NumPy arrays, and ``like=`` makes an array of this kind. An
    index that is a NumPy array, which CuPy copies, is refused, too.
    """

    def __init__(self, host: Any) -> None:
        self.host = np.asarray(host)

    def __getattr__(self, name: str) -> Any:
        if name not in {"dtype", "flags", "itemsize", "ndim", "shape", "size", "strides"}:
            raise AttributeError(name)
        return getattr(self.host, name)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.host.ctypes.data)

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, key: Any) -> "DeviceArray":
        return DeviceArray(self.host[_keys(key)])

    def __setitem__(self, key: Any, value: "DeviceArray") -> None:
        self.host[_keys(key)] = value.host

    def astype(self, dtype: Any, copy: bool = True) -> "DeviceArray":
        return DeviceArray(self.host.astype(dtype, copy=copy))

    def fill(self, number: float) -> None:
        self.host.fill(number)

    def copy(self) -> "DeviceArray":
        return DeviceArray(self.host.copy())

    def reshape(self, *shape: int) -> "DeviceArray":
        return DeviceArray(self.host.reshape(*shape))

    def swapaxes(self, one: int, other: int) -> "DeviceArray":
        return DeviceArray(self.host.swapaxes(one, other))

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> Any:
        if method != "__call__" or options or any(isinstance(x, np.ndarray) for x in given):
            return NotImplemented
        return DeviceArray(ufunc(*map(_host, given)))

    def __array_function__(self, function: Any, _types: Any, given: Any, options: Any) -> Any:
        if function not in OFFERED:
            return NotImplemented
        if function is np.searchsorted and any(isinstance(x, np.ndarray) for x in given):
            return NotImplemented
        return DeviceArray(function(*map(_host, given), **options))

    def _wait(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this waits for the device")

    __array__ = __bool__ = __float__ = __index__ = __int__ = __iter__ = _wait


def _host(x: Any) -> Any:
    return x.host if isinstance(x, DeviceArray) else x


def _keys(key: Any) -> Any:
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(x, np.ndarray) for x in keys):
        raise TypeError("an index is on the host, and the array is not")
    return tuple(map(_host, keys))


class DeviceBackend(NumpyBackend):
    """Owns these arrays, and could compute nothing with them."""

    name = "device"

    def owns(self, x: Any) -> bool:
        return isinstance(x, DeviceArray)


def owned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registry know these arrays until the end of a test."""
    monkeypatch.setitem(registry._loaded, "device", DeviceBackend())
