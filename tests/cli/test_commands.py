"""The command line: what it prints for people and programs, and how it ends."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tileattn
from tileattn import BlockMask
from tileattn.backends import threads
from tileattn.backends.numpy.backend import NumpyBackend
from tileattn.call.options import OPTIONS
from tileattn.cli import commands, explain
from tileattn.cli.commands import main
from tileattn.testing import selfcheck

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


# --- every command ------------------------------------------------------------------------------


def arguments_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Yield the arguments of a parser and of its commands, with the program's name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from arguments_of(command)
        else:
            yield parser.prog, action


def test_every_argument_has_help() -> None:
    found = list(arguments_of(commands.parser()))
    assert [(prog, x.dest) for prog, x in found if not x.help] == []
    assert len({prog for prog, _ in found}) == 7


def test_a_pipe_that_closes_ends_a_command_quietly() -> None:
    command = [sys.executable, "-m", "tileattn", "bench"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `head` does, long before the command prints
        assert process.stderr.read() == b""
    assert process.returncode == commands.PIPE_CLOSED


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tileattn, "explain", interrupted)
    assert main(["explain"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_json_of_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tileattn"] == tileattn.__version__
    assert found["backends"] == tileattn.available_backends()
    assert found["workers"] >= 1


def test_json_of_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--json"]) == 0
    assert "cpu" in json.loads(capsys.readouterr().out)


# --- check --------------------------------------------------------------------------------------


class WithoutSinks(NumpyBackend):
    name = "without_sinks"

    def why_not(self, problem: Any) -> str | None:
        return "it has no sinks" if problem.has_sinks else None


class Nothing(NumpyBackend):
    name = "nothing"

    def why_not(self, _: Any) -> str | None:
        return "it supports nothing"


@pytest.mark.usefixtures("one_blas_thread")
def test_a_backend_of_another_package_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["check", "--problems", "8", "--json", "--backend"]
    assert main([*line, f"{__name__}:WithoutSinks"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["backend"] == "without_sinks"
    assert found["problems"] == 8
    assert found["not_supported"] > 0
    assert found["failure"] is None
    assert main([*line, "without_sinks"]) == 0  # it is registered now


def test_a_backend_that_supports_nothing_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tileattn.cli.check.MOST_PASSED_OVER", 5)
    assert main(["check", "--backend", f"{__name__}:Nothing"]) == 1
    assert capsys.readouterr().out == "backend 'nothing' supports none of 5 problems\n"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine", "backend must be one of auto, numpy, llvm, cupy; got 'mine'"),
        ("no_such_module:Mine", "No module named 'no_such_module'"),
        ("tileattn.errors:Mine", "module tileattn.errors has no attribute 'Mine'"),
        ("tileattn.errors:UnsupportedError", "backend must be a Backend; UnsupportedError lacks"),
    ],
)
def test_a_backend_that_is_not_there(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--backend", name]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_ctrl_c_says_what_was_checked(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = []

    def check(*_: Any) -> bool:
        checked.append(1)
        if len(checked) == 4:
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr(selfcheck, "check", check)
    assert main(["check", "--backend", "numpy", *more]) == 130
    out = capsys.readouterr().out
    if more:
        found = json.loads(out)
        assert (found["interrupted"], found["problems"]) == (True, 3)
    else:
        assert out.startswith("interrupted after 3 problems on backend 'numpy', which all match")


# --- explain ------------------------------------------------------------------------------------


BLOCKS = BlockMask(np.array([[True, False], [True, True]]), (64, 64))


def near(_b: Any, _h: Any, i: Any, j: Any) -> Any:
    """Mask pairs that are far from each other."""
    return abs(i - j) < 9


def doubled(s: Any, _b: Any, _h: Any, _i: Any, _j: Any) -> Any:
    """Double the scores."""
    return 2 * s


TABLE = ()

LINES = {
    "scale": "--scale 0.5",
    "softcap": "--softcap 20",
    "alibi_slopes": "--alibi-slopes",
    "bias": "--bias 128,1",
    "causal": "--causal",
    "invariant": "--invariant",
    "window": "--window 5 None",
    "mask": "--mask",
    "block_mask": f"--block-mask {__name__}:BLOCKS",
    "kv_lengths": "--kv-lengths 100",
    "q_offset": "--q-offset 3",
    "cu_seqlens_q": "--cu-seqlens-q 0,100,128",
    "cu_seqlens_k": "--cu-seqlens-q 0,100,128 --cu-seqlens-k 0,7,128",
    "block_table": "--page-size 16 --kv-lengths 99",
    "k_descale": "--kv-dtype int8",
    "v_descale": "--kv-dtype float8_e4m3fn",
    "tree_mask": "--tree-mask --kv-lengths 128",
    "prefix": "--prefix 9 --causal",
    "origin": "--origin 0,0,5,5 --dropout-p 0.5",
    "sinks": "--sinks",
    "dropout_p": "--dropout-p 0.1",
    "seed": "--seed 7 --dropout-p 0.5",
    "score_mod": f"--score-mod {__name__}:doubled",
    "mask_mod": f"--mask-mod {__name__}:near",
    "aux": f"--mask-mod {__name__}:near --aux {__name__}:TABLE",
}


@pytest.mark.parametrize("more", ["", " --arch sm_90"], ids=["here", "sm_90"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_is_explained(
    name: str, more: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, Any]] = []
    call_of = explain.call_of

    def recorded(arguments: argparse.Namespace) -> Any:
        call = call_of(arguments)
        seen.append(call[3])
        return call

    monkeypatch.setattr(explain, "call_of", recorded)
    status = main(["explain", "--Nq", "128", "--json", *f"{LINES[name]}{more}".split()])
    assert name in seen[0]
    assert status == 0
    assert json.loads(capsys.readouterr().out)["kernel"]


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("--Nq 1 --B 2 --page-size 8 --kv-lengths 30,5", 32),
        ("--Nq 1 --B 2 --kv-lengths 30,5", 30),
        ("--cu-seqlens-q 0,2,4 --cu-seqlens-k 0,20,30", 30),
        ("--cu-seqlens-q 0,2,4", 4),
        ("--Nq 5", 5),
    ],
)
def test_the_number_of_keys_follows_from_what_is_given(line: str, keys: int) -> None:
    _, k, _, options = explain.call_of(commands.parser().parse_args(["explain", *line.split()]))
    pages = options.get("block_table")
    assert keys == (k.shape[2] if pages is None else pages.shape[1] * k.shape[2])


def test_the_plans_are_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--Nq", "64", "--arch", "sm_80", "--plan", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["plans"]) == 2


@pytest.mark.parametrize("with_compiler", [True, False])
def test_an_architecture_that_is_not_known(
    with_compiler: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not with_compiler:
        monkeypatch.setitem(sys.modules, "cupy_backends", None)
        monkeypatch.setitem(sys.modules, "cupy", None)
    assert main(["explain", "--arch", "sm_999"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ValueError: arch must be ")
    assert "sm_90" in err
    assert err.endswith("got 'sm_999'\n")


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
