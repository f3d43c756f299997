"""The disk cache of kernels: nothing unsound is read, and nothing in its way breaks a call."""

import os
import stat
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tileattn.kernels import disk_cache as cache

INPUTS = "cuda-" + "5a" * 32
OTHER = "llvm-" + "a5" * 32
BODY = bytes(range(256)) * 40

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes are those of POSIX")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a folder that is not there yet, and every warning again."""
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path / "outmost" / "outer" / "cache"))
    cache._warn_once.cache_clear()
    return tmp_path / "outmost" / "outer" / "cache"


def entry(place: Path, inputs: str = INPUTS) -> Path:
    return place / f"{inputs}.kernel"


# --- what it is for -----------------------------------------------------------------------------


def test_what_was_written_is_read_and_nothing_else(place: Path) -> None:
    assert cache.read(INPUTS) is None
    assert not place.exists(), "reading made the folder"
    cache.write(INPUTS, BODY)
    assert cache.read(INPUTS) == BODY
    assert cache.read(OTHER) is None
    cache.write(INPUTS, b"")
    assert cache.read(INPUTS) == b""  # the last write counts
    assert [path.name for path in place.iterdir()] == [f"{INPUTS}.kernel"]


@posix
def test_an_entry_is_made_by_one_at_a_time(place: Path) -> None:
    """Each takes the lock by a handle of its own, as another process would."""
    made: list[int] = []

    def work(number: int) -> None:
        with cache.alone(INPUTS):
            if cache.read(INPUTS) is None:
                time.sleep(0.1)
                made.append(number)
                cache.write(INPUTS, BODY)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert len(made) == 1
    assert [path.name for path in place.iterdir()] == [f"{INPUTS}.kernel"]
    with cache.alone(INPUTS), cache.alone(OTHER):  # others are made meanwhile
        pass


@posix
def test_nobody_waits_for_ever(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_PATIENCE", 0.1)
    with cache.alone(INPUTS), cache.alone(INPUTS):
        cache.write(INPUTS, BODY)
    assert [path.name for path in place.iterdir()] == [f"{INPUTS}.kernel"]


@posix
def test_only_the_owner_may_read_or_write(place: Path) -> None:
    before = os.umask(0)
    try:
        cache.write(INPUTS, BODY)
    finally:
        os.umask(before)
    for made in (place.parents[1], place.parent, place):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(place).stat().st_mode) == 0o600


# --- what is not sound --------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut within the header": lambda data: data[:20],
    "cut to the header": lambda data: data[: cache._HEADER.size],
    "cut by a byte": lambda data: data[:-1],
    "a byte too many": lambda data: data + b"\0",
    "a bit of the body flipped": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "of another program": lambda _: b"\x7fELF" + BODY,
    "of another version": lambda data: data[:8] + b"\xff" + data[9:],
    "all zeros, as after a power cut": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_not_read_and_is_repaired_by_a_write(place: Path, damage: str) -> None:
    cache.write(INPUTS, BODY)
    sound = entry(place).read_bytes()
    entry(place).write_bytes(DAMAGE[damage](sound))
    assert entry(place).read_bytes() != sound
    assert cache.read(INPUTS) is None
    cache.write(INPUTS, BODY)
    assert cache.read(INPUTS) == BODY


def test_a_sound_entry_under_another_name_is_not_read(place: Path) -> None:
    cache.write(INPUTS, BODY)
    entry(place).rename(entry(place, OTHER))
    assert cache.read(OTHER) is None


# --- what stands in the way ---------------------------------------------------------------------


def in_vain() -> None:
    assert cache.read(INPUTS) is None
    cache.write(INPUTS, BODY)
    cache.write(OTHER, BODY)


def refused(reason: str) -> None:
    """Reading and writing go on without the cache, and only the first warns."""
    with pytest.warns(RuntimeWarning, match=reason) as said:
        in_vain()
    assert len(said) == 1
    assert "TILEATTN_CACHE_DIR" in str(said[0].message)


@posix
def test_a_folder_of_another_user_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write(INPUTS, BODY)
    if os.geteuid() == 0:
        os.chown(place, 4242, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4343)
    refused("belongs to another user")
    assert not entry(place, OTHER).exists()


@posix
def test_a_folder_of_the_superuser_is_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser makes a folder of the superuser")
    cache.write(INPUTS, BODY)
    monkeypatch.setattr(os, "geteuid", lambda: 4343)
    assert place.stat().st_uid == 0
    assert cache.read(INPUTS) == BODY


@posix
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(place: Path, mode: int) -> None:
    cache.write(INPUTS, BODY)
    place.chmod(mode)
    refused("chmod go-w")
    assert not entry(place, OTHER).exists()
    place.chmod(0o755)
    assert cache.read(INPUTS) == BODY


@posix
@pytest.mark.parametrize("mode", [0o660, 0o602, 0o666])
def test_an_entry_that_others_can_write_to_is_refused(place: Path, mode: int) -> None:
    cache.write(INPUTS, BODY)
    entry(place).chmod(mode)
    with pytest.warns(RuntimeWarning, match=rf"{INPUTS}\.kernel is writable by other users"):
        assert cache.read(INPUTS) is None
    cache.write(INPUTS, BODY)  # repairs it
    assert cache.read(INPUTS) == BODY
    entry(place).chmod(0o644)
    assert cache.read(INPUTS) == BODY


@posix
def test_an_entry_of_another_user_is_refused(place: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only the superuser makes a file of another user")
    cache.write(INPUTS, BODY)
    os.chown(entry(place), 4242, -1)
    with pytest.warns(RuntimeWarning, match=rf"{INPUTS}\.kernel belongs to another user"):
        assert cache.read(INPUTS) is None


@posix
def test_an_entry_that_is_a_link_is_refused(place: Path, tmp_path: Path) -> None:
    """Also where it leads to a sound entry that is private now: its folder may not be."""
    cache.write(INPUTS, BODY)
    elsewhere = entry(place).rename(tmp_path / "elsewhere")
    entry(place).symlink_to(elsewhere)
    with pytest.warns(RuntimeWarning, match="symbolic links"):
        assert cache.read(INPUTS) is None
    cache.write(INPUTS, b"new")  # in the place of the link, not where it leads
    assert cache.read(INPUTS) == b"new"
    assert BODY in elsewhere.read_bytes()


def test_a_read_only_folder_is_read_and_not_written(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write(INPUTS, BODY)
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may write all the same
    with pytest.warns(RuntimeWarning, match="is read-only"):
        cache.write(OTHER, BODY)
    assert cache.read(INPUTS) == BODY
    assert [x.path for x in cache.entries()] == [entry(place)]


def test_a_full_disk_leaves_nothing_behind(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write(OTHER, BODY)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        cache.write(INPUTS, BODY)
    assert list(place.iterdir()) == [entry(place, OTHER)]


def test_a_file_where_the_folder_should_be(place: Path) -> None:
    place.parent.mkdir(parents=True)
    place.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="without the disk cache"):
        cache.write(INPUTS, BODY)
    with cache.alone(INPUTS), cache.alone(INPUTS):  # no process waits where nothing can be kept
        assert place.read_text() == "not a folder"


def test_a_folder_where_an_entry_should_be(place: Path) -> None:
    cache.write(OTHER, BODY)
    entry(place).mkdir()
    refused("without the disk cache")
    assert [x.path for x in cache.entries()] == [entry(place, OTHER)]
    assert entry(place).is_dir()


@posix
def test_a_pipe_where_an_entry_should_be(place: Path) -> None:
    """A read would wait for a writer for ever; a write takes its place."""
    cache.write(OTHER, BODY)
    os.mkfifo(entry(place), 0o600)
    with pytest.warns(RuntimeWarning, match="is not a regular file; remove it"):
        assert cache.read(INPUTS) is None
    cache.write(INPUTS, BODY)
    assert cache.read(INPUTS) == BODY
    os.mkfifo(place / f"{OTHER}.lock", 0o600)
    with cache.alone(OTHER):
        assert cache.read(OTHER) == BODY


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("TILEATTN_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    refused("no home directory")
    assert cache.entries() == []
    monkeypatch.setenv("TILEATTN_CACHE_DIR", "~stranger")
    with pytest.raises(OSError, match="no home directory for ~stranger"):
        cache.folder()


# --- where it is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "xdg", "expected"),
    [
        ("linux", None, ".cache/tileattn"),
        ("linux", "relative", ".cache/tileattn"),
        ("linux", "/var/xdg", "/var/xdg/tileattn"),
        ("darwin", None, "Library/Caches/tileattn"),
        ("darwin", "/var/xdg", "Library/Caches/tileattn"),
    ],
)
@posix
def test_the_folder_of_each_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str, xdg: str | None, expected: str
) -> None:
    monkeypatch.delenv("TILEATTN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    assert cache.folder() == tmp_path / expected


@pytest.mark.skipif(os.name != "nt", reason="the folder of Windows")
def test_the_folder_of_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TILEATTN_CACHE_DIR")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert cache.folder() == tmp_path / "tileattn"


def test_the_chosen_folder_comes_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.parent / "xdg"))
    assert cache.folder() == place
    monkeypatch.setenv("TILEATTN_CACHE_DIR", "")
    assert cache.folder() != place
    monkeypatch.setenv("TILEATTN_CACHE_DIR", "~/kernels")
    assert cache.folder() == Path.home() / "kernels"


# --- emptying it --------------------------------------------------------------------------------


def test_clear_removes_what_is_ours_and_nothing_else(place: Path) -> None:
    assert cache.clear() == []
    cache.write(INPUTS, BODY)
    cache.write(OTHER, BODY)
    (place / f"{INPUTS}.kernel.k3_x9.part").write_bytes(b"left by a process that was ended")
    strangers = [place / "notes.txt", place / f"{INPUTS}.kernel.txt", place / f"x{INPUTS}.kernel"]
    for path in strangers:
        path.write_text("keep")
    assert len(cache.clear()) == 3
    assert sorted(place.iterdir()) == sorted(strangers)
