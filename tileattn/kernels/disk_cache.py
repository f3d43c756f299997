"""The disk cache of compiled kernels: private to the user, and optional.

An entry is named by the digest of its inputs. Its header repeats that digest and the digest of its
content, so that a truncated, damaged or foreign file is ignored and then overwritten. A cache that
cannot be used costs a warning, not a call.
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
_PATIENCE = 60.0  # seconds that a process waits for another one to compile the same kernel


def folder() -> Path:
    """Return the folder of the cache, without creating it.

    It is ``TILEATTN_CACHE_DIR`` if that is set, else the system's folder for a user's caches. Raise
    OSError if it needs a home directory and the user has none.
    """
    if chosen := os.environ.get("TILEATTN_CACHE_DIR"):
        return _expanded(chosen)
    # The XDG specification says to ignore relative paths; the same is right for Windows.
    base = Path(os.environ.get("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", ""))
    if sys.platform == "darwin" or not base.is_absolute():
        default = {"nt": "AppData/Local", "darwin": "Library/Caches"}
        base = _expanded("~") / default.get("nt" if os.name == "nt" else sys.platform, ".cache")
    return base / "tileattn"


def prepare() -> Path:
    """Create the folder and its parents, for their owner only.

    Raise OSError if the folder cannot be created or written to, or if other users can write to it.
    """
    where = folder()
    for place in (*reversed(where.parents), where):
        place.mkdir(mode=0o700, exist_ok=True)  # parents=True would give parents another mode
    _check_private(where, where.stat())
    if not os.access(where, os.W_OK):
        raise PermissionError(f"{where} is read-only")
    return where


def read(inputs: str) -> bytes | None:
    """Return the body of an entry; None if it is missing, damaged, or writable by other users."""
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
    """Write an entry atomically; on failure, warn once."""
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
    """Let one process or thread at a time compile an entry; others wait up to a minute.

    Without effect on Windows, and if the folder cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):  # `write` warns of it
                lock = prepare() / f"{inputs}.lock"
                handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                stack.callback(os.close, handle)  # releases the lock
                stack.callback(lock.unlink, missing_ok=True)
                deadline = time.monotonic() + _PATIENCE
                while not _is_locked(handle) and time.monotonic() < deadline:
                    time.sleep(0.02)
        yield


def _is_locked(handle: int) -> bool:
    """Try to lock an open file; return True on success."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def entries() -> list[Path]:
    """List the files of the cache, including the remains of interrupted writes."""
    try:
        return sorted(path for path in folder().iterdir() if _OURS.fullmatch(path.name))
    except OSError:
        return []


def clear() -> int:
    """Remove all files of the cache; return their number."""
    found = entries()
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _header(inputs: str, body: bytes) -> bytes:
    """Return the header of an entry."""
    made = hashlib.sha256(body).digest()
    return _HEADER.pack(_MAGIC, _VERSION, bytes.fromhex(inputs), made)


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise OSError(f"there is no home directory for {path}") from error


def _opened_itself(path: str, flags: int) -> int:
    """Open a file, but no symbolic link; do not wait for the writer of a pipe."""
    only_here = ("O_NOFOLLOW", "O_NONBLOCK")  # Windows lacks them
    return os.open(path, reduce(or_, (getattr(os, name, 0) for name in only_here), flags))


def _check_private(where: Path, status: os.stat_result) -> None:
    """Raise OSError if another user could have put code into a folder or an entry.

    Also for anything but a folder or a regular file: reading a pipe or a device may never end.
    """
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        raise OSError(f"{where} is not a regular file; remove it")
    if os.name != "posix":
        return
    # The superuser can write anywhere, and fills the caches of containers.
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{where} belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o022:
        raise PermissionError(f"{where} is writable by other users; chmod go-w fixes that")


def _sentence(error: OSError) -> str:
    """Describe an error without the name of a temporary file, which differs each time."""
    if error.strerror is None:
        return str(error)
    place = ""
    with contextlib.suppress(OSError):
        place = f"{folder()}: "
    return f"{place}{error.strerror}"


@functools.cache
def _warn_once(sentence: str) -> None:
    warnings.warn(
        f"kernels are compiled without the disk cache: {sentence}; set TILEATTN_CACHE_DIR to "
        "another folder",
        RuntimeWarning,
        stacklevel=2,
    )
