"""The disk cache of compiled kernels: private to the user, bounded, and optional.

An entry is named by its kind and the digest of its inputs. Its header repeats that digest and the
digest of its content, so that a truncated, damaged or foreign file is ignored and then overwritten.
A cache that cannot be used costs a warning, not a call.

A write removes the entries that were not used for longest, until the others fit into `limit` bytes.
The time of use is the file's modification time, which a read renews once a day. Another process
that looks for a removed entry compiles it again; one that has opened it reads it to the end.
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
from operator import attrgetter, or_
from pathlib import Path
from typing import NamedTuple

if sys.platform != "win32":
    import fcntl

_MAGIC = b"tileattn"
_VERSION = 1
_HEADER = struct.Struct("<8sI32s32s")  # magic, version, digest of the inputs, digest of the body
_OURS = re.compile(r"(?:(cuda|llvm)-)?[0-9a-f]{64}\.(?:kernel(?:\.\w+\.part)?|lock)")
_PATIENCE = 60.0  # seconds that a process waits for another one to compile the same kernel

LIMIT = 1 << 30  # bytes of the default limit
_RENEWED = 86_400.0  # seconds after which a read renews the time of use: a write to the disk
_ABANDONED = 3_600.0  # seconds after which a lock or a partial file is left from an ended process


class Entry(NamedTuple):
    """A file of the cache."""

    path: Path
    kind: str  # "cuda" or "llvm"; "" for an entry of an older version
    nbytes: int
    used: float  # seconds since the epoch, exact to a day

    @property
    def is_kernel(self) -> bool:
        """False for a lock, or for a file that is being written."""
        return self.path.suffix == ".kernel"


def name_of(kind: str, *made_from: object) -> str:
    """Name an entry of a kind, "cuda" or "llvm", by everything that it is made from."""
    return f"{kind}-{hashlib.sha256(repr(made_from).encode()).hexdigest()}"


def limit() -> int:
    """Return the largest number of bytes of the cache: ``TILEATTN_CACHE_BYTES``, or `LIMIT`."""
    given = os.environ.get("TILEATTN_CACHE_BYTES")
    if not given:
        return LIMIT
    if not given.isdecimal():
        raise ValueError(
            "TILEATTN_CACHE_BYTES must be a whole number of bytes, 0 or more; "
            f"got {given!r} (1 GiB is {LIMIT})"
        )
    return int(given)


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


def read(name: str) -> bytes | None:
    """Return the body of an entry; None if it is missing, damaged, or writable by other users."""
    limit()  # raises
    try:
        where = folder()
        _check_private(where, where.stat())
        entry = where / f"{name}.kernel"
        with open(entry, "rb", opener=_opened_itself) as file:
            status = os.fstat(file.fileno())
            _check_private(entry, status)
            data = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(_sentence(error))
        return None
    header, body = data[: _HEADER.size], data[_HEADER.size :]
    if header != _header(name, body):
        return None
    if abs(time.time() - status.st_mtime) > _RENEWED:
        with contextlib.suppress(OSError):  # another process has removed it, or the disk is full
            os.utime(entry)
    return body


def write(name: str, body: bytes) -> None:
    """Write an entry atomically, and remove what exceeds the limit; on failure, warn once."""
    file_name, most = f"{name}.kernel", limit()
    try:
        where = prepare()
        # In the same folder, so that the rename is atomic; mkstemp makes the file 0600.
        handle, part = tempfile.mkstemp(prefix=f"{file_name}.", suffix=".part", dir=where)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_header(name, body) + body)
            Path(part).replace(where / file_name)
        except BaseException:
            Path(part).unlink(missing_ok=True)
            raise
    except OSError as error:
        _warn_once(_sentence(error))
    else:
        _evict(most)


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Let one process or thread at a time compile an entry; others wait up to a minute.

    Without effect on Windows, and if the folder cannot be written to.
    """
    with contextlib.ExitStack() as stack:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):  # `write` warns of it
                lock = prepare() / f"{name}.lock"
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


def entries() -> list[Entry]:
    """List the files of the cache, least recently used first."""
    found = []
    try:
        with os.scandir(folder()) as files:
            for file in files:
                match = _OURS.fullmatch(file.name)
                if match is None or file.is_dir(follow_symlinks=False):
                    continue
                with contextlib.suppress(OSError):  # another process has removed it
                    status = file.stat(follow_symlinks=False)
                    path, kind = Path(file.path), match[1] or ""
                    found.append(Entry(path, kind, status.st_size, status.st_mtime))
    except OSError:
        return []
    return sorted(found, key=attrgetter("used", "path"))


def clear() -> list[Entry]:
    """Remove all files of the cache; return them."""
    return [entry for entry in entries() if _removed(entry)]


def _evict(most: int) -> None:
    """Remove the least recently used entries until the rest fits, and what ended processes left."""
    found, now = entries(), time.time()
    total = sum(entry.nbytes for entry in found)
    for entry in found:
        goes = total > most if entry.is_kernel else now - entry.used > _ABANDONED
        if goes and _removed(entry):
            total -= entry.nbytes


def _removed(entry: Entry) -> bool:
    """Remove a file; return False if that fails, as on Windows if another process reads it."""
    try:
        entry.path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _header(name: str, body: bytes) -> bytes:
    """Return the header of an entry."""
    made = hashlib.sha256(body).digest()
    return _HEADER.pack(_MAGIC, _VERSION, bytes.fromhex(name.partition("-")[2]), made)


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
