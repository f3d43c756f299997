"""The limit of the disk cache: what a write removes, and what it costs other processes."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.kernels.test_disk_cache import BODY, INPUTS, OTHER, entry
from tileattn.kernels import disk_cache as cache

SIZE = cache._HEADER.size + len(BODY)
NAMES = [f"llvm-{n:064x}" for n in range(9)]
HOUR = 3600.0


pytestmark = pytest.mark.usefixtures("place")


def limited(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Set a limit for a number of entries."""
    monkeypatch.setenv("TILEATTN_CACHE_BYTES", str(count * SIZE))


def grow_older(path: Path, hours: float) -> None:
    now = time.time()
    os.utime(path, (now, now - hours * HOUR))


def kept() -> set[str]:
    return {x.path.stem for x in cache.entries()}


def test_a_write_removes_what_was_not_used_for_longest(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 3)
    for n, name in enumerate(NAMES[:3]):
        cache.write(name, BODY)
        grow_older(entry(place, name), 100 - n)
    assert kept() == {*NAMES[:3]}
    assert cache.read(NAMES[0]) == BODY  # now the latest
    cache.write(NAMES[3], BODY)
    assert kept() == {NAMES[0], NAMES[2], NAMES[3]}
    assert cache.read(NAMES[1]) is None
    monkeypatch.setenv("TILEATTN_CACHE_BYTES", "0")
    cache.write(NAMES[4], BODY)
    assert kept() == set()


def test_a_read_renews_the_time_of_use_once_a_day(place: Path) -> None:
    cache.write(INPUTS, BODY)
    for hours, renewed in ((23, False), (25, True), (-25, True)):  # the last is a wrong clock
        grow_older(entry(place), hours)
        before = entry(place).stat().st_mtime
        assert cache.read(INPUTS) == BODY
        after = entry(place).stat().st_mtime
        assert (after != before) is renewed
        assert not renewed or abs(after - time.time()) < HOUR


def test_the_default_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for unset in (None, ""):
        monkeypatch.delenv("TILEATTN_CACHE_BYTES", raising=False)
        if unset is not None:
            monkeypatch.setenv("TILEATTN_CACHE_BYTES", unset)
        assert cache.limit() == 1 << 30


@pytest.mark.parametrize("given", ["-1", "1GB", "1e9", "0x10", " "])
def test_a_limit_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_BYTES", given)
    message = "^TILEATTN_CACHE_BYTES must be a whole number of bytes, 0 or more; got "
    for use in (cache.limit, lambda: cache.read(INPUTS), lambda: cache.write(INPUTS, BODY)):
        with pytest.raises(ValueError, match=message):
            use()


def test_what_ended_processes_left_is_removed_and_strangers_are_not(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 2)
    cache.write(OTHER, BODY)
    left = [place / f"{INPUTS}.lock", place / f"{INPUTS}.kernel.k3_x9.part"]
    busy = [place / f"{NAMES[8]}.lock", place / f"{NAMES[8]}.kernel.k3_x9.part"]
    strangers = [place / "notes.txt", place / f"x{INPUTS}.kernel"]
    for path in (*left, *busy, *strangers):
        path.write_bytes(bytes(0 if path in busy else SIZE))
    for path in (*left, *strangers):
        grow_older(path, 3)
    cache.write(INPUTS, BODY)
    assert {*place.iterdir()} == {*busy, *strangers, entry(place), entry(place, OTHER)}


def test_an_entry_of_an_older_version_is_removed_too(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 1)
    cache.write(INPUTS, BODY)
    older = entry(place).rename(place / f"{'ab' * 32}.kernel")
    grow_older(older, 1)
    assert [x.kind for x in cache.entries()] == [""]
    cache.write(INPUTS, BODY)
    assert kept() == {INPUTS}


def test_an_entry_that_cannot_be_removed_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows while another process reads it."""
    limited(monkeypatch, 1)
    cache.write(OTHER, BODY)

    def busy(self: Path, **_: object) -> None:
        raise PermissionError(13, "the file is used by another process", str(self))

    monkeypatch.setattr(Path, "unlink", busy)
    cache.write(INPUTS, BODY)
    assert kept() == {INPUTS, OTHER}
    assert cache.clear() == []


def test_processes_share_a_small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each removes what others read and write; all get sound entries or none, and no warning."""
    limited(monkeypatch, 2)
    code = """
        import sys
        from tileattn.kernels import disk_cache as cache
        body, found = bytes(range(256)) * 40, 0
        for n in range(150):  # read each name twice: others seldom remove it in between
            name = f"llvm-{n // 2 * int(sys.argv[1]) % 5:064x}"
            read = cache.read(name)
            assert read in (None, body)
            found += read is not None
            if read is None:
                with cache.alone(name):
                    cache.write(name, body)
        print(found)
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    environment = {**os.environ, "PYTHONPATH": str(Path(cache.__file__).parents[2])}
    started = [
        subprocess.Popen([*command, step], env=environment, stdout=subprocess.PIPE)
        for step in ("1", "2", "3")
    ]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    for process in started:
        assert process.stdout is not None
        assert 0 < int(process.stdout.read()) < 150
        process.stdout.close()
    cache.write(INPUTS, BODY)  # without others that write at the same time
    assert sum(x.nbytes for x in cache.entries()) <= 2 * SIZE
