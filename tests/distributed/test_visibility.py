"""Which ranks attend to which, and to how many keys, against all pairs of query and key."""

from itertools import product
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.whole_sequence import layouts
from tileattn.distributed import Layout
from tileattn.distributed.visibility import Visibility, reach

SIDES = st.none() | st.integers(0, 20)


def visible(where: Visibility, Nq: int, Nk: int) -> Any:
    """Return which pairs of each batch entry are visible; shape (B, Nq, Nk)."""
    left, right = where.window
    keys = np.arange(Nk)
    at = np.arange(Nq)[:, np.newaxis] + where.q_offset[:, np.newaxis, np.newaxis]
    found = np.broadcast_to(keys < where.kv_lengths[:, np.newaxis, np.newaxis], (2, Nq, Nk)).copy()
    if left is not None:
        found &= keys >= at - left
    if right is not None:
        found &= keys <= at + right
    return found


@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(1, 7),
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    window=st.tuples(SIDES, SIDES),
    offsets=st.tuples(st.integers(-50, 50), st.integers(-50, 50)),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_ranks_and_pairs_are_those_of_the_mask(
    seed: int, ranks: int, sizes: tuple[int, int], window: Any, offsets: tuple[int, int]
) -> None:
    rng, (Nq, Nk) = np.random.default_rng(seed), sizes
    queries, keys = layouts(rng, Nq, ranks), layouts(rng, Nk, ranks)
    where = Visibility(window, rng.integers(0, Nk + 1, 2), np.array(offsets))
    pairs = visible(where, Nq, Nk)
    own = [queries.take(pairs, rank, axis=1) for rank in range(ranks)]
    assert where.pairs(queries).tolist() == [x.sum() for x in own]
    attending = [*where.attending(queries, keys)]
    needed = np.zeros((ranks, ranks), bool)
    for rank, source in product(range(ranks), repeat=2):
        needed[source, rank] = keys.take(own[rank], source, axis=2).any()
        assert attending[source][rank] == hull(where, queries, keys, rank, source)
        assert attending[source][rank] >= needed[source, rank]
    for source, steps in enumerate(reach(attending)):
        ahead = [attending[source][(source + t) % ranks] for t in range(ranks)]
        assert steps == max((t for t in range(ranks) if ahead[t]), default=0)


def hull(where: Visibility, queries: Layout, keys: Layout, rank: int, source: int) -> bool:
    """True if some block of two ranks has a visible pair."""
    blocks = product(queries.segments(rank), keys.segments(source))
    return any(where.block(a, c) for a, c in blocks)
