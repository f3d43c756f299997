"""Every option by every schedule: honoured by ranks as by one call, or refused by its name."""

from collections.abc import Callable
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tileattn.distributed as dist
from tests.distributed.threads import Rank, on_ranks
from tests.distributed.whole_sequence import check_once, comparison, results
from tileattn import Attention, BlockMask, Gradients, reference
from tileattn.call.options import Options
from tileattn.distributed import Layout
from tileattn.distributed.validation import REFUSED
from tileattn.errors import UnsupportedError
from tileattn.testing import AttentionCase

B, HQ, HKV, NQ, NK, D, DV = 2, 12, 6, 17, 23, 8, 5  # 2 ranks and 3 share the heads of keys
RNG = np.random.default_rng(7)
SCHEDULES = "ring", "gather", "heads", "auto"


def learned(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return s + table[h, abs(i - j)] * (b + 1)


def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i + 2 * j + b + h) % 3 != 0


# A value of each option that must change the result. What it goes with stands beside it.
CHANGES: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "alibi_slopes": {"alibi_slopes": RNG.uniform(0.1, 0.5, (B, HQ))},
    "bias": {"bias": RNG.standard_normal((HQ, NQ, NK))},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "mask": {"mask": RNG.random((B, 1, NQ, NK)) < 0.6},
    "kv_lengths": {"kv_lengths": np.array([19, 4])},
    "q_offset": {"q_offset": np.array([1, 9]), "causal": True},
    "origin": {"origin": RNG.integers(0, 9, (B, 4)), "dropout_p": 0.4},
    "sinks": {"sinks": RNG.standard_normal(HQ)},
    "dropout_p": {"dropout_p": 0.3},
    "seed": {"seed": 2**40 + 3, "dropout_p": 0.3},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s * (1 + 0.1 * h) + 0.1 * (i - j) * (b + 1)},
    "mask_mod": {"mask_mod": visible},
    "aux": {"aux": (RNG.standard_normal((HQ, NK)),), "score_mod": learned},
    "block_mask": {"block_mask": BlockMask(np.eye(2, 3, dtype=bool), block_size=(16, 8))},
    "tree_mask": {"tree_mask": np.tril(np.ones((1, NQ, NQ), bool))},
    "prefix": {"prefix": 9, "causal": True},
    "block_table": {"block_table": np.zeros((B, 1), np.int64)},
    "k_descale": {"k_descale": 0.5},
    "v_descale": {"v_descale": 0.5},
    "cu_seqlens_q": {"cu_seqlens_q": np.array([0, NQ])},
    "cu_seqlens_k": {"cu_seqlens_k": np.array([0, NK])},
    "invariant": {"invariant": True},
}
HONOURED = sorted(set(CHANGES) - set(REFUSED))


def case_of(options: dict[str, Any]) -> AttentionCase:
    rng = np.random.default_rng(1)
    q, dout = (rng.standard_normal((B, HQ, NQ, n)) for n in (D, DV))
    k, v = (rng.standard_normal((B, HKV, NK, n)) for n in (D, DV))
    return AttentionCase(q, k, v, dout, rng.standard_normal((B, HQ, NQ)), options)


def layouts(ranks: int) -> tuple[Layout, Layout]:
    return Layout.zigzag(NQ, ranks), Layout.striped(NK, ranks, 4)


def test_every_option_has_a_row() -> None:
    assert set(CHANGES) == set(Options.__annotations__)


@pytest.mark.parametrize("name", HONOURED)
def test_a_row_changes_the_result(name: str) -> None:
    with_it = CHANGES[name]
    without = {} if name == "aux" else {n: x for n, x in with_it.items() if n != name}
    q, k, v, *_ = case_of({})
    found, plain = (reference.forward(q, k, v, **options) for options in (with_it, without))
    assert not np.allclose(found.out, plain.out)


@cache
def compared_with_oracle(name: str) -> Callable[[Attention, Gradients], None]:
    """Ask the oracle once for all schedules and numbers of ranks."""
    return comparison(case_of(CHANGES[name]))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", HONOURED)
def test_it_is_honoured(name: str, schedule: str, ranks: int) -> None:
    found = results(case_of(CHANGES[name]), *layouts(ranks), schedule=schedule)
    compared_with_oracle(name)(*found)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_it_is_refused(name: str, schedule: str) -> None:
    q, k, v, *_ = case_of({})

    def run(comm: Rank) -> Any:
        return dist.forward(q, k, v, comm, schedule=schedule, **CHANGES[name])

    for found in on_ranks(2, run):
        assert isinstance(found, UnsupportedError), found
        assert str(found).startswith(f"{name} does not go with a sequence that ranks")


PAIRS = [
    (one, other)
    for one, other in combinations(HONOURED, 2)
    if not CHANGES[one].keys() & CHANGES[other].keys()
]


@given(
    pair=st.sampled_from(PAIRS), schedule=st.sampled_from(SCHEDULES), ranks=st.sampled_from([2, 3])
)
@settings(max_examples=40)  # each starts threads, and asks the oracle for both passes twice
def test_pairs(pair: tuple[str, str], schedule: str, ranks: int) -> None:
    both = CHANGES[pair[0]] | CHANGES[pair[1]]
    check_once(case_of(both), *layouts(ranks), schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_that_are_not_asked_for(schedule: str) -> None:
    options = CHANGES["bias"] | CHANGES["sinks"] | CHANGES["aux"]
    whole = case_of(options)
    queries, keys = layouts(2)
    names = ("q", "k", "v", "bias", "sinks", "aux")

    def run(comm: Rank) -> Any:
        own = options | {"bias": queries.take(options["bias"], comm.rank)}
        q, dout = (queries.take(x, comm.rank) for x in (whole.q, whole.dout))
        k, v = (keys.take(x, comm.rank) for x in (whole.k, whole.v))
        given: dict[str, Any] = {"layout": queries, "layout_k": keys, "schedule": schedule}
        _, pullback = dist.vjp(q, k, v, comm, **given, **own)
        every = pullback(dout)
        for name in names:
            some = pullback(dout, wrt=(name,))
            for other in names:
                found = getattr(some, f"d{other}")
                assert (found is None) == (other != name), (name, other)
            one, same = (getattr(x, f"d{name}") for x in (some, every))
            assert np.array_equal(one, same)

    assert on_ranks(2, run) == [None, None]
