"""`bench end_to_end` trains and generates with the same weights; here small models on the CPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks import end_to_end  # noqa: E402 - it imports torch
from benchmarks.clock import Queue  # noqa: E402 - as above
from benchmarks.end_to_end import Bench, over_peers  # noqa: E402 - as above
from benchmarks.libraries import DropIn, Sdpa, Torch  # noqa: E402 - as above
from benchmarks.models import Attention, Sizes  # noqa: E402 - as above
from tests.torch.precision import precision  # noqa: E402 - as above

GPT, LLAMA = Sizes(2, 32, 2, 2, 48, 50, 24), Sizes(2, 32, 4, 2, 48, 50, 512)
TOKENS = 5


class Wrong(Sdpa):
    """Attends to all keys alike."""

    def attend(self, step: Any) -> Any:
        attend = None if "dropout_p" in step.options else super().attend(step)
        return attend and (lambda q, k, v: attend(0 * q, k, v))


def bench(*more: Torch) -> Bench:
    every = [DropIn("tileattn"), Sdpa("SDPA"), *more]
    limits = (1, 2, TOKENS)
    training = (2, [GPT.tokens], (0.1, 0.0))
    return Bench("cpu", torch.float32, every, Queue(int, int), *limits, GPT, LLAMA, *training)


def test_libraries_that_lack_dropout_or_are_wrong_do_not_train() -> None:
    dropped, kept = end_to_end.training(bench(Wrong("wrong")))
    assert (dropped["dropout"], kept["dropout"]) == (0.1, 0)
    assert dropped["failed"] == {"wrong": "NotImplementedError: there is no dropout_p"}
    assert kept["failed"]["wrong"].startswith("RuntimeError: the gradients differ by ")
    for row in (dropped, kept):
        assert set(row["ms"]) == {"tileattn", "SDPA"}
        assert list(row["repeated_ms"]) == ["tileattn"]


def test_every_length_has_a_row_and_as_many_tokens_in_a_batch() -> None:
    lengths = [12, 24, 80]
    rows = list(end_to_end.training(replace(bench(), lengths=lengths, dropouts=(0.0,))))
    assert [row["tokens"] for row in rows] == lengths
    assert [row["sizes"].partition(" heads, ")[2] for row in rows] == [
        "batches of 4, 3 to 12 tokens",
        "batches of 2, 6 to 24 tokens",
        "batches of 1, 20 to 80 tokens",
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_without_attention_takes_turns_but_is_no_peer(dtype: str) -> None:
    given = replace(bench(), dtype=getattr(torch, dtype), rounds=3, dropouts=(0.0,))
    (row,) = end_to_end.training(given)
    assert row["dtype"] == dtype
    assert row["failed"] == {}
    assert set(row["ms"]) == {"tileattn", "SDPA"}
    own, other, rest = row["ms"]["tileattn"], row["ms"]["SDPA"], row["rest_ms"]
    assert row["over_peers"] == {"tileattn": other / own}
    ratio = {"tileattn": (other - rest) / (own - rest)} if min(own, other) > rest > 0 else {}
    assert row["attention_over_peers"] == ratio


def test_attention_is_compared_less_the_rest() -> None:
    ms = {"tileattn": 5.0, "fast": 6.0, "slow": 9.0}
    assert over_peers(ms, ["tileattn"]) == {"tileattn": 1.2}
    assert over_peers(ms, ["tileattn"], 4.5) == {"tileattn": 3.0}
    assert over_peers(ms, ["tileattn"], 5.0) == over_peers(ms, ["tileattn"], 6.5) == {}
    assert over_peers(ms | {"fast": 4.0}, ["tileattn"], 4.5) == {}
    assert over_peers({"tileattn": 5.0}, ["tileattn"]) == {}


def test_a_model_without_attention_passes_on_its_values() -> None:
    q, k, v = torch.randn(3, 2, 5, 2, 16).unbind()
    assert torch.equal(Attention(end_to_end.REST, GPT, dropout_p=0.1)(q, k, v), v)


def test_padding_is_no_target() -> None:
    tokens, targets = end_to_end.batch(20, bench())
    assert tokens.shape == targets.shape == (2, 20)
    assert (targets[0] >= 0).all()
    assert (targets[1] >= 0).sum() >= 10


def test_all_libraries_generate_the_same_tokens() -> None:
    rows = list(end_to_end.generation(bench(Wrong("wrong"))))
    assert rows[0]["model"] == "plain"
    assert rows[0]["failed"]["wrong"].startswith("RuntimeError: the logits differ by ")
    for row in rows:
        assert row["equal_tokens"] == {"tileattn": TOKENS, "SDPA": TOKENS}
        assert set(row["ms"]) == {"tileattn", "SDPA"}


def test_tokens_agree_up_to_the_first_that_differs() -> None:
    assert end_to_end.agreeing([[4, 5, 6]], [[4, 7, 6]]) == 1
    assert end_to_end.agreeing([[4, 5, 6]], [[4, 5, 6]]) == 3


# --- the command line -----------------------------------------------------------------------------


def ran(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """Run a section that only says what it was given; return the name of the file, and its row."""
    matmul = torch.backends.cuda.matmul

    def training(bench: Bench) -> Any:
        known = {"dtype": str(bench.dtype), "lengths": bench.lengths, "dropouts": bench.dropouts}
        yield known | {"batch": bench.batch, "precision": matmul.fp32_precision}

    monkeypatch.setitem(end_to_end.SECTIONS, "training", training)
    end_to_end.main(["--only", "training", "--to", str(folder), *line.split()])
    (path,) = folder.iterdir()
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return path.name, row


@pytest.mark.parametrize(
    ("line", "name", "dtype", "lengths", "dropouts"),
    [
        ("", "end_to_end_cpu", "float32", [160], [0.1, 0]),
        ("--dtype f32 --quick", "end_to_end_cpu", "float32", [160], [0]),
        ("--dtype bf16 --quick", "end_to_end_cpu_bf16", "bfloat16", [160], [0.1, 0]),
        ("--dtype bf16 --name mine --tokens 64,320", "mine", "bfloat16", [64, 320], [0.1, 0]),
    ],
)
def test_options_choose_the_dtype_the_lengths_and_the_file(
    line: str,
    name: str,
    dtype: str,
    lengths: list[int],
    dropouts: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, row = ran(line, tmp_path, monkeypatch)
    assert file == f"{name}.json"
    assert row["dtype"] == f"torch.{dtype}"
    assert (row["lengths"], row["dropouts"], row["batch"]) == (lengths, dropouts, 2)


def failing(_: Bench) -> Any:
    raise RuntimeError("it fails")


@pytest.mark.parametrize("own", ["none", "tf32"])
def test_matmuls_are_exact_in_a_run_and_as_before_after_it(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul = torch.backends.cuda.matmul
    with precision("torch.backends.cuda.matmul", own):
        _, row = ran("", tmp_path, monkeypatch)
        assert (row["precision"], matmul.fp32_precision) == ("ieee", own)
        monkeypatch.setitem(end_to_end.SECTIONS, "training", failing)
        with pytest.raises(RuntimeError, match="it fails"):
            end_to_end.main(["--only", "training", "--to", str(tmp_path)])
        assert matmul.fp32_precision == own


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("0", "0"),
        ("-1", "-1"),
        ("many", "many"),
        ("64,", ""),
        ("1.5", "1.5"),
        ("64,65537", "65537"),
    ],
)
def test_wrong_lengths_are_refused(
    text: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        end_to_end.main([f"--tokens={text}"])
    said = "argument --tokens: must be integers from 64 to 65536, separated by commas"
    assert f"{said}; got {wrong!r}\n" in capsys.readouterr().err
