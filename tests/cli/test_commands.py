"""Messages of the command line about wrong arguments and a wrong environment."""

import pytest

import tileattn
from tileattn.backends import threads
from tileattn.cli.commands import main

WHOLE = "must be a whole number of at least {}; got {!r}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("explain --Nq -5", "--Nq: " + WHOLE.format(0, "-5")),
        ("explain --window -1 0", f"--window: {WHOLE.format(0, '-1')}; None leaves a side open"),
        ("explain --softcap many", "--softcap: must be a finite number; got 'many'"),
        ("explain --dropout-p nan", "--dropout-p: must be a finite number; got 'nan'"),
        ("check --problems 0", "--problems: " + WHOLE.format(1, "0")),
        ("check --seconds nan", "--seconds: must be a number of at least 0; got 'nan'"),
        ("compile --jobs none", "--jobs: " + WHOLE.format(1, "none")),
    ],
)
def test_numbers_out_of_range_are_refused(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    assert f"argument {said}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--Nq 1000000000000", "--Nq must be at most 67,108,864; got 1,000,000,000,000"),
        ("--Nq 16 --Nk 1000000000000 --arch sm_90a", "--Nk must be at most 67,108,864; got 1,000"),
        ("--B 1000000 --Nq 16", "--B times --Hq must be at most 131,072; got 8,000,000"),
        ("--D 1000000000000000000000", "Maximum allowed dimension exceeded"),
    ],
)
def test_sizes_that_would_take_too_long_are_refused(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *line.split()]) == 2
    assert f"ValueError: {said}" in capsys.readouterr().err


def test_plans_are_of_an_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--plan"]) == 2
    assert capsys.readouterr().err == ("--plan needs --arch: it prints the launch plans of a GPU\n")


@pytest.mark.parametrize(("line", "keys"), [("--Nq 0", 0), ("--Nq 7 --Nk 0", 0)])
def test_a_size_of_zero_is_one(line: str, keys: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *line.split()]) == 0
    assert f"tiles     0 empty, {keys} partial, 0 full" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"tileattn {tileattn.__version__}\n"


@pytest.fixture
def fresh() -> None:
    """Forget the number of threads, which an earlier test may have read."""
    threads.worker_count.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("command", ["check", "explain"])
def test_a_number_of_threads_that_is_none(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILEATTN_NUM_THREADS", "foo")
    threads.worker_count.cache_clear()
    assert main([command]) == 2
    assert "TILEATTN_NUM_THREADS must be a positive integer; got 'foo'\n" in capsys.readouterr().err


@pytest.mark.usefixtures("fresh")
def test_info_names_what_is_wrong_with_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILEATTN_NUM_THREADS", "foo")
    monkeypatch.setenv("TILEATTN_BACKEND", "bar")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "TILEATTN_NUM_THREADS must be a positive integer; got 'foo'\n" in out
    assert "TILEATTN_BACKEND must be one of auto, " in out
