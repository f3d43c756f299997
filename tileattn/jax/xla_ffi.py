"""The part of XLA's foreign function interface that a handler in Python needs.

The structures mirror ``xla/ffi/api/c_api.h``, which jaxlib ships in ``jax.ffi.include_dir()``. New
versions of the interface append fields.
"""

import ctypes
import traceback
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from typing import Any, NoReturn

FUNCTIONS = (
    *("Error_Create", "Error_GetMessage", "Error_Destroy", "Handler_Register", "Stream_Get"),
    *("Type_Register", "ExecutionContext_Get", "State_Set", "State_Get"),
    *("DeviceMemory_Allocate", "DeviceMemory_Free", "ThreadPool_Schedule"),
    *("ThreadPool_NumThreads", "Future_Create", "Future_SetAvailable", "Future_SetError"),
    *("RunId_Get", "DeviceOrdinal_Get"),
)
"""Names of the function pointers at the end of the structure ``XLA_FFI_Api``, in order."""

VERSION = (0, 3)
"""Version of the interface that these structures belong to."""

_MOST_ALIGNED = 16  # bytes; the largest alignment that XLA allocates
_ALIGNMENT = 256  # bytes; what the kernels get
_METADATA = 1
_INVALID_ARGUMENT, _INTERNAL = 3, 13


def _struct(name: str, *, headed: bool = True, **fields: Any) -> Any:
    """Make a ctypes structure; most begin with their size and a list of extensions."""
    head = {"struct_size": c_size_t, "extension": c_void_p} if headed else {}
    made: Any = type(name, (ctypes.Structure,), {"_fields_": [*(head | fields).items()]})
    last = getattr(made, [*fields][-1])
    made.nbytes = last.offset + last.size  # XLA counts no padding at the end
    return made


Version = _struct("Version", major=c_int, minor=c_int)
Api = _struct("Api", version=Version, internal=c_void_p, functions=c_void_p * len(FUNCTIONS))
Buffer = _struct("Buffer", dtype=c_int, data=c_void_p, rank=c_int64, dims=POINTER(c_int64))
Buffers = _struct("Buffers", size=c_int64, types=c_void_p, at=POINTER(POINTER(Buffer)))
Scalar = _struct("Scalar", headed=False, dtype=c_int, value=POINTER(c_int64))
Attributes = _struct(
    "Attributes", size=c_int64, types=c_void_p, names=c_void_p, at=POINTER(POINTER(Scalar))
)
CallFrame = _struct(
    "CallFrame",
    api=POINTER(Api),
    context=c_void_p,
    stage=c_int,
    arguments=Buffers,
    results=Buffers,
    attributes=Attributes,
)
Metadata = _struct(
    "Metadata", headed=False, size=c_size_t, version=Version, traits=c_uint32, state=c_int64
)
Extension = _struct(
    "Extension", headed=False, size=c_size_t, type=c_int, next=c_void_p, metadata=POINTER(Metadata)
)

_ARGUMENTS: dict[str, Any] = {
    "Error_Create": {"message": c_char_p, "code": c_int},
    "Error_GetMessage": {"error": c_void_p, "message": c_char_p},
    "Error_Destroy": {"error": c_void_p},
    "Stream_Get": {"context": c_void_p, "stream": c_void_p},
    "DeviceOrdinal_Get": {"context": c_void_p, "ordinal": c_int32},
    "DeviceMemory_Allocate": {
        **{"context": c_void_p, "size": c_size_t, "alignment": c_size_t, "data": c_void_p}
    },
    "DeviceMemory_Free": {"context": c_void_p, "size": c_size_t, "data": c_void_p},
}
_STRUCTS = {name: _struct(name, **fields) for name, fields in _ARGUMENTS.items()}

HANDLER = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))
"""The type of a handler: it returns an error, or None."""

_FUNCTION = ctypes.CFUNCTYPE(c_void_p, c_void_p)


class Frame:
    """A call from a compiled program."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame
        self._api = ctypes.addressof(frame.api.contents)

    def answers_metadata(self) -> bool:
        """Return True if XLA only requests the handler's metadata, after filling it in."""
        if not self._frame.extension:
            return False
        extension = Extension.from_address(self._frame.extension)
        if extension.type != _METADATA:
            return False
        theirs = self._frame.api.contents.version
        found = extension.metadata.contents
        found.version.struct_size = Version.nbytes
        found.version.major, found.version.minor = min(VERSION, (theirs.major, theirs.minor))
        found.traits = 0  # no command buffers: a call may allocate and compile
        return True

    @property
    def handle(self) -> int:
        """The number of the call, its only attribute."""
        value: int = self._frame.attributes.at[0].contents.value[0]
        return value

    @property
    def arguments(self) -> list[int]:
        """Addresses of the arguments."""
        return _addresses(self._frame.arguments)

    @property
    def results(self) -> list[int]:
        """Addresses of the results."""
        return _addresses(self._frame.results)

    @property
    def stream(self) -> int:
        """The device stream on which the program runs."""
        return self._call("Stream_Get").stream or 0

    @property
    def device(self) -> int:
        """The number of the device."""
        ordinal: int = self._call("DeviceOrdinal_Get").ordinal
        return ordinal

    def allocate(self, nbytes: int) -> tuple[int, tuple[int, int]]:
        """Allocate device memory; return an aligned address, and the arguments of `free`."""
        size = nbytes + _ALIGNMENT - _MOST_ALIGNED
        data = self._call("DeviceMemory_Allocate", size=size, alignment=_MOST_ALIGNED).data
        return -(-data // _ALIGNMENT) * _ALIGNMENT, (data, size)

    def free(self, data: int, size: int) -> None:
        """Free memory; XLA reuses it in stream order."""
        self._call("DeviceMemory_Free", data=data, size=size)

    def error(self, error: BaseException) -> int:
        """Convert an exception to an XLA error."""
        text = "".join(traceback.format_exception(error))
        code = _INVALID_ARGUMENT if isinstance(error, TypeError | ValueError) else _INTERNAL
        return _called(self._api, "Error_Create", message=text.encode(), code=code)[1]

    def _call(self, name: str, **arguments: Any) -> Any:
        """Call a function of the interface; return the structure that it has filled in."""
        found, error = _called(self._api, name, context=self._frame.context, **arguments)
        if error:
            _raise(self._api, name, error)
        return found


def _called(api: int, name: str, **arguments: Any) -> tuple[Any, int]:
    """Call a function; return the structure that it has filled in, and its error or 0."""
    struct = _STRUCTS[name]
    made = struct(struct_size=struct.nbytes, **arguments)
    return made, _function(api, name)(ctypes.addressof(made)) or 0


def _raise(api: int, name: str, error: int) -> NoReturn:
    """Raise an error that a function of the interface returned, and destroy it."""
    found, _ = _called(api, "Error_GetMessage", error=error)
    message = (found.message or b"").decode(errors="replace")
    _called(api, "Error_Destroy", error=error)
    kind = MemoryError if name == "DeviceMemory_Allocate" else RuntimeError
    raise kind(f"XLA's {name} failed: {message}")


def _addresses(buffers: Any) -> list[int]:
    return [buffers.at[n].contents.data or 0 for n in range(buffers.size)]


@cache
def _function(api: int, name: str) -> Any:
    """Look up a function of the interface."""
    found, place = Api.from_address(api), FUNCTIONS.index(name)
    if found.struct_size < Api.functions.offset + (place + 1) * ctypes.sizeof(c_void_p):
        raise RuntimeError(
            f"jaxlib's foreign function interface must be version {VERSION[0]}.{VERSION[1]} or "
            f"newer, which has {name}; got {found.version.major}.{found.version.minor} "
            "(pip install --upgrade jax)"
        )
    return _FUNCTION(found.functions[place])
