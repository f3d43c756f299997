"""The tests for a GPU are dealt out to processes, each to one, and their results are added up."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import conftest
from tools import gpu_tests

ROOT = Path(__file__).parents[2]


def shared(share: str | None, count: int = 20) -> tuple[list[str], list[str]]:
    """Name the tests that a share runs, and those that it leaves out."""
    items: list[Any] = [
        SimpleNamespace(path=Path(f"test_{n % 3}.py"), nodeid=f"test_{n % 3}.py::test[{n}]")
        for n in range(count)
    ]
    deselected = Mock()
    hook = SimpleNamespace(pytest_deselected=deselected)
    config: Any = SimpleNamespace(getoption=lambda name, *_: {"shard": share}.get(name), hook=hook)
    conftest.pytest_collection_modifyitems(config, items)
    left = deselected.call_args.kwargs["items"] if deselected.called else []
    return [x.nodeid for x in items], [x.nodeid for x in left]


def test_each_test_is_in_one_share() -> None:
    every, none = shared(None)
    shares = [shared(f"{n}/3") for n in range(3)]
    assert not none
    assert sorted(x for mine, _ in shares for x in mine) == sorted(every)
    assert [len(mine) for mine, _ in shares] == [7, 7, 6]
    assert all(sorted((*mine, *left)) == sorted(every) for mine, left in shares)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("def test(): pass", 0, "1 passed, 0 failed, 0 skipped"),
        ("def test(): assert 0", 1, "0 passed, 1 failed, 0 skipped"),
        ("import time\ndef test(): time.sleep(100)", 1, "did not end within 8 s"),
    ],
    ids=["passes", "fails", "hangs"],
)
def test_it_ends_and_says_how(
    text: str, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_it.py").write_text(
        f"import pytest\npytestmark = pytest.mark.gpu\n{text}\n", encoding="utf-8"
    )
    seconds = 8 if "sleep" in text else 60
    options = ["--processes=2", f"--seconds={seconds}", f"--rootdir={ROOT}"]
    options += [f"--confcutdir={ROOT}", "-p", "conftest", "-c", str(ROOT / "pyproject.toml")]
    assert gpu_tests.main([*options, str(tmp_path)]) == status
    assert said in capsys.readouterr().out
