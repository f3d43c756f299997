"""Compiled kernels on disk: private to the user, whole or absent, never in the way of a call.

An entry is named by the digest of everything that went into it, and repeats that digest and the
digest of its own content in its header: what is cut short, damaged or of another making is not
read, and is overwritten by the next write.
"""

import contextlib
import functools
import hashlib
import os
import re
import stat
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import reduce
from operator import or_
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_MAGIC = b"tileattn"
_VERSION = 1
_HEADER = struct.Struct("<8sI32s32s")  # magic, version, digest of the inputs, digest of the body
_OURS = re.compile(r"[0-9a-f]{64}\.(kernel(\.\w+\.part)?|lock)")
_PATIENCE = 60.0  # seconds that a process waits for another to make an entry


def folder() -> Path:
    """Say where the entries are kept; nothing is created.

    ``TILEATTN_CACHE_DIR`` where that is set, its ``~`` expanded, else the system's place for a
    user's caches; OSError where the user has no home directory.
    """
    if chosen := os.environ.get("TILEATTN_CACHE_DIR"):
        return _expanded(chosen)
    # The XDG specification has relative paths ignored, and one of Windows would make no more sense.
    base = Path(os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", ""))
    if sys.platform == "darwin" or not base.is_absolute():
        default = {"nt": "AppData/Local", "darwin": "Library/Caches"}
        base = _expanded("~") / default.get("nt" if os.name == "nt" else sys.platform, ".cache")
    return base / "tileattn"


def prepare() -> Path:
    """Make the folder, and those above it, where they are missing: for their owner alone.

    OSError where it cannot be made or written to, or where others could have written to it.
    """
    where = folder()
    for place in (*reversed(where.parents), where):
        place.mkdir(mode=0o700, exist_ok=True)  # with parents=True, those would have another mode
    _check_private(where, where.stat())
    if not os.access(where, os.W_OK):
        raise PermissionError(f"{where} is read-only")
    return where


def read(inputs: str) -> bytes | None:
    """Fetch the body of an entry; None where none is sound, or others could have written it."""
    try:
        where = folder()
        _check_private(where, where.stat())
        entry = where / f"{inputs}.kernel"
        with open(entry, "rb", opener=_opened_itself) as file:
            _check_private(entry, os.fstat(file.fileno()))
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(_sentence(error))
        return None
    header, body = data[: _HEADER.size], data[_HEADER.size :]
    return body if header == _header(inputs, body) else None


def write(inputs: str, body: bytes) -> None:
    """Keep an entry, whole or not at all; where that fails, warn once and go on."""
    name = f"{inputs}.kernel"
    try:
        where = prepare()
        # In the same folder, so that the rename is atomic; mkstemp makes the file 0600.
        handle, part = tempfile.mkstemp(prefix=f"{name}.", suffix=".part", dir=where)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_header(inputs, body) + body)
            Path(part).replace(where / name)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
    except OSError as error:
        _warn_once(_sentence(error))


@contextlib.contextmanager
def alone(inputs: str) -> Iterator[None]:
    """Let one process, or thread, at a time make an entry; the others wait, but not for ever.

    On Windows, and where the folder cannot be written to, nobody waits.
    """
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):  # of which `write` warns
                lock = prepare() / f"{inputs}.lock"
                handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                stack.callback(os.close, handle)  # which gives the lock back
                stack.callback(lock.unlink, missing_ok=True)
                deadline = time.monotonic() + _PATIENCE
                while not _is_locked(handle) and time.monotonic() < deadline:
                    time.sleep(0.02)
        yield


def _is_locked(handle: int) -> bool:
    """Take the lock of an open file, if nobody has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def entries() -> list[Path]:
    """List the files that are ours, those that a broken-off write left behind included."""
    try:
        return sorted(path for path in folder().iterdir() if _OURS.fullmatch(path.name))
    except OSError:
        return []


def clear() -> int:
    """Remove every file that is ours, and return how many there were."""
    found = entries()
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _header(inputs: str, body: bytes) -> bytes:
    """Write what an entry begins with; nothing else does for these inputs and this body."""
    made = hashlib.sha256(body).digest()
    return _HEADER.pack(_MAGIC, _VERSION, bytes.fromhex(inputs), made)


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise OSError(f"there is no home directory for {path}") from error


def _opened_itself(path: str, flags: int) -> int:
    """Open a file, not what a symbolic link leads to; do not wait for the writer of a pipe."""
    only_here = ("O_NOFOLLOW", "O_NONBLOCK")  # which Windows lacks
    return os.open(path, reduce(or_, (getattr(os, name, 0) for name in only_here), flags))


def _check_private(where: Path, status: os.stat_result) -> None:
    """Refuse a folder or an entry where somebody else could have put code for us to run.

    Anything but a folder or a regular file is refused, too: a read of a pipe or of a device may
    never end.
    """
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        raise OSError(f"{where} is no regular file; remove it")
    if os.name != "posix":
        return
    # The superuser can write anywhere, and fills the caches of containers.
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{where} belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o022:
        raise PermissionError(f"{where} can be written to by others; chmod go-w fixes that")


def _sentence(error: OSError) -> str:
    """Say what failed, without the name of a temporary file, which is new each time."""
    if error.strerror is None:
        return str(error)
    place = ""
    with contextlib.suppress(OSError):
        place = f"{folder()}: "
    return f"{place}{error.strerror}"


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(
        f"kernels are compiled without the disk cache: {sentence}; TILEATTN_CACHE_DIR may name "
        "another folder",
        RuntimeWarning,
        stacklevel=2,
    )
