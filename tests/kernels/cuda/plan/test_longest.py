"""How many queries and keys the CUDA kernels take: their positions have 32 bits."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

import tileattn
from tileattn.backends.cupy.backend import CupyBackend
from tileattn.backends.cupy.numbers import LONGEST
from tileattn.backends.registry import supporting
from tileattn.call.parse import parse
from tileattn.kernels.cuda.jit.compile import SOURCES


@pytest.mark.parametrize("name", ["Nq", "Nk"])
def test_what_is_longer_is_refused(name: str) -> None:
    x = np.zeros((3, 1), np.float16)
    longest = dataclasses.replace(parse(x, x, x, {})[0], Nq=LONGEST, Nk=LONGEST)
    assert CupyBackend().why_not(longest) is None
    longer: dict[str, Any] = {name: LONGEST + 1}
    reason = f"{name} is 1,073,676,289, and the kernels take up to 1,073,676,288"
    with pytest.raises(tileattn.UnsupportedError, match=rf"{reason} .*; use backend='numpy'$"):
        supporting([CupyBackend()], dataclasses.replace(longest, **longer))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"Nk": LONGEST + 1}, "Nk is 1,073,676,289, and the kernels take up to"),
        ({"Nq": 1 << 29, "Hq": 4}, "block_table: with more than 1,073,741,824 queries that share"),
    ],
    ids=["Nk", "rows"],
)
def test_what_is_longer_in_pages_is_refused(sizes: dict[str, Any], reason: str) -> None:
    q, pages = np.zeros((1, 2, 1, 1), np.float16), np.zeros((3, 1, 16, 1), np.float16)
    options = {"block_table": np.zeros((1, 1), np.int64), "kv_lengths": [16]}
    paged = parse(q, pages, pages, options)[0]
    assert CupyBackend().why_not(dataclasses.replace(paged, Nq=1 << 29)) is None
    with pytest.raises(tileattn.UnsupportedError, match=reason):
        supporting([CupyBackend()], dataclasses.replace(paged, **sizes))


def test_sums_of_the_kernels_have_room() -> None:
    """A position, what stands for no limit, and two tiles, of which none has 1024 rows."""
    source = (SOURCES / "mask.cuh").read_text(encoding="utf-8")
    far = re.search(r"^constexpr int FAR = 1 << (\d+);", source, re.MULTILINE)
    assert far is not None
    limit, longest = 1 << int(far[1]), LONGEST + 2 * 1024
    assert longest < limit
    assert longest + limit < 1 << 31
