"""`bench end_to_end` trains and generates with the same weights; here small models on the CPU."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks import end_to_end  # noqa: E402 - it imports torch
from benchmarks.clock import Queue  # noqa: E402 - as above
from benchmarks.end_to_end import Bench  # noqa: E402 - as above
from benchmarks.libraries import DropIn, Sdpa, Torch  # noqa: E402 - as above
from benchmarks.models import Sizes  # noqa: E402 - as above

GPT, LLAMA = Sizes(2, 32, 2, 2, 48, 50, 24), Sizes(2, 32, 4, 2, 48, 50, 512)
TOKENS = 5


class Wrong(Sdpa):
    """Attends to all keys alike."""

    def attend(self, step: Any) -> Any:
        attend = None if "dropout_p" in step.options else super().attend(step)
        return attend and (lambda q, k, v: attend(0 * q, k, v))


def bench(*more: Torch) -> Bench:
    every = [DropIn("tileattn"), Sdpa("SDPA"), *more]
    return Bench("cpu", every, Queue(int, int), 1, 2, TOKENS, GPT, LLAMA)


def test_libraries_that_lack_dropout_or_are_wrong_do_not_train() -> None:
    dropped, kept = end_to_end.training(bench(Wrong("wrong")))
    assert (dropped["dropout"], kept["dropout"]) == (0.1, 0)
    assert dropped["failed"] == {"wrong": "NotImplementedError: there is no dropout_p"}
    assert kept["failed"]["wrong"].startswith("RuntimeError: the gradients differ by ")
    for row in (dropped, kept):
        assert set(row["ms"]) == {"tileattn", "SDPA"}
        assert list(row["repeated_ms"]) == ["tileattn"]


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
