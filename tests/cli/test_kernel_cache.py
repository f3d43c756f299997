"""The command ``cache``."""

import os
import time
from pathlib import Path

import pytest

from tileattn.cli.commands import main
from tileattn.kernels import disk_cache as cache

MIB = bytes(1 << 20)
NAMES = [f"{kind}-{n:064x}" for n, kind in enumerate(("cuda", "llvm", "cuda"))]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a cache with an entry of each kind, and what an older version has left."""
    monkeypatch.setenv("TILEATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TILEATTN_CACHE_BYTES", raising=False)
    for day, name in enumerate(NAMES, 1):
        cache.write(name, MIB)
        at = time.mktime((2026, 3, day, 12, 30, 0, 0, 0, -1))
        os.utime(tmp_path / "cache" / f"{name}.kernel", (at, at))
    return tmp_path / "cache"


def test_the_command_shows_each_kind(
    capsys: pytest.CaptureFixture[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_BYTES", str(5 << 19))
    (place / ("ab" * 32 + ".kernel")).write_bytes(MIB)
    (place / "notes.txt").write_bytes(MIB)
    assert main(["cache"]) == 0
    folder, limit, blank, *table = capsys.readouterr().out.splitlines()
    assert folder.split()[1] == str(place)
    assert limit == "limit     2.5 MiB (set TILEATTN_CACHE_BYTES to change)"
    rows = {row.split()[0]: row.split()[1:] for row in table}
    assert not blank
    assert rows["CUDA"] == ["2", "2.0", "2026-03-01", "12:30", "2026-03-03", "12:30"]
    assert rows["llvm"] == ["1", "1.0", "2026-03-02", "12:30", "2026-03-02", "12:30"]
    assert rows["other"][:2] == ["1", "1.0"]
    assert rows["all"][:4] == ["4", "4.0", "2026-03-01", "12:30"]


def test_the_command_clears(capsys: pytest.CaptureFixture[str], place: Path) -> None:
    assert main(["cache", "--clear"]) == 0
    counts = "CUDA: 2 files, 2.0 MiB, llvm: 1 file, 1.0 MiB"
    assert capsys.readouterr().out == f"removed 3 files, 3.0 MiB from {place} ({counts})\n"
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"removed 0 files, 0.0 MiB from {place}\n"
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "0", "0.0", "-", "-"]


@pytest.mark.parametrize("line", ["cache", "compile --arch sm_80"])
def test_a_wrong_limit_is_named(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_BYTES", "1GB")
    message = "TILEATTN_CACHE_BYTES must be a whole number of bytes, 0 or more; got '1GB'"
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err
    assert main(["info"]) == 0
    assert f"none: {message}" in capsys.readouterr().out


def test_a_user_without_a_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEATTN_CACHE_DIR", "~stranger-of-this-system")
    assert main(["cache"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("no kernel cache: there is no home directory for ~stranger")
    assert "TILEATTN_CACHE_DIR" in said
