"""In what order Hopper's backward kernels take their work tiles; no GPU."""

from dataclasses import replace
from typing import Any

import pytest

from tests.kernels.cuda.plan.planning import ON_HOPPER
from tests.kernels.cuda.plan.schedules import CACHE, CAUSAL, shaped
from tileattn.call.problem import Problem
from tileattn.kernels.cuda.families.backward_pass import backward_launches
from tileattn.kernels.cuda.families.hopper import HOPPER_BACKWARDS
from tileattn.kernels.cuda.plan.layout import contiguous_inputs
from tileattn.kernels.cuda.plan.scheduler import schedule_of


@pytest.mark.parametrize(
    ("D", "Dv", "Nq", "together", "causal", "grouped", "in_order"),
    [
        (128, 128, 512, 25, 49, 12, 32),
        (128, 128, 4096, 5, 4, 5, 6),
        (128, 128, 1 << 20, 5, 9, 5, 9),
        (64, 128, 2048, 10, 20, 5, 20),
        (128, 64, 2048, 7, 12, 5, 14),
    ],
)
def test_how_many_heads_are_worked_on_together(
    D: int, Dv: int, Nq: int, together: int, causal: int, grouped: int, in_order: int
) -> None:
    """What comes back of them fills 12.5 MiB, at least a wave.

    In order, or under a long causal mask, it fills 25 MiB, or two waves; there in whole waves.
    """
    P = shaped("float16", D, B=3, Hkv=50, Hq=50, Nq=Nq, Nk=4096, Dv=Dv)

    def groups(P: Problem, deterministic: bool = False) -> int:
        launches = backward_launches(P, ON_HOPPER, deterministic=deterministic, sinks=False)
        found = schedule_of(P, contiguous_inputs(P), launches, CACHE)
        assert (found.assignment, found.in_order) == (None, deterministic)
        return found.head_groups

    assert groups(P) == -(-150 // together)
    assert groups(replace(P, Hq=100)) == -(-150 // grouped)  # twice as much of each head of keys
    assert groups(P, deterministic=True) == -(-150 // in_order)
    masked = replace(P, window=CAUSAL)
    assert groups(masked) == -(-150 // causal)
    # Under a causal mask two waves of heads begin apart, or 1,024 keys of each are at work; in a
    # window, and of heads that share keys, two waves are.
    assert groups(masked, deterministic=True) == -(-150 // (9 if D == 128 else 16))
    assert groups(replace(masked, Hq=100), deterministic=True) == -(-150 // 8)
    assert groups(replace(P, window=(70, 0)), deterministic=True) == -(-150 // 8)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [(None, None), CAUSAL])
def test_wide_heads_have_no_order(window: Any, deterministic: bool) -> None:
    """They add nothing. Their queries and gradients fill 12.5 MiB, or 25 under a causal mask."""
    P = shaped("float16", 256, B=3, Hkv=50, Hq=50, Nq=512, Nk=4096, window=window)
    launches = backward_launches(P, ON_HOPPER, deterministic=deterministic, sinks=False)
    found = schedule_of(P, contiguous_inputs(P), launches, CACHE)
    together = 25 if window[1] is None else 50
    assert (found.head_groups, found.in_order) == (-(-150 // together), False)


@pytest.mark.parametrize(
    ("changed", "together", "last_first"),
    [
        ({"window": CAUSAL}, 66, True),
        ({"window": CAUSAL, "Nq": 7000, "Nk": 4000}, 8, True),
        ({"window": CAUSAL, "Nk": 8192}, 4, True),
        ({}, 66, False),
        ({"Nk": 8192}, 4, False),
        ({"window": CAUSAL, "Hq": 64}, 16, False),
        ({"window": (70, 0)}, 16, False),
        ({"window": CAUSAL, "D": 128, "Dv": 128}, 33, False),
        ({"window": CAUSAL, "enabled_options": frozenset({"alibi_slopes"})}, 16, False),
        ({"window": CAUSAL, "enabled_options": frozenset({"block_mask"})}, 16, False),
    ],
    ids=str,
)
def test_narrow_heads_whose_key_blocks_go_in_step(
    changed: dict[str, Any], together: int, last_first: bool
) -> None:
    """Two waves of their blocks, under a causal mask the last ones first, but not by default."""
    P = shaped("float16", 64, **{"B": 32, "Hq": 32, "Hkv": 32, "Nq": 512, "Nk": 512} | changed)
    for deterministic in (True, False):
        launches = backward_launches(P, ON_HOPPER, deterministic=deterministic, sinks=False)
        found = schedule_of(P, contiguous_inputs(P), launches, CACHE)
        assert found.last_keys_first is (last_first and deterministic)
        if deterministic or "window" not in changed:
            assert found.head_groups == -(-1024 // together)


@pytest.mark.parametrize(
    ("changed", "apart"),
    [
        ({"Nk": 512}, 33),
        ({"D": 80, "Dv": 80}, 33),
        ({"Nk": 1024}, 33),
        ({"Nk": 2048}, 17),
        ({"Nk": 2049}, 15),
        ({"Nk": 4096}, 9),
        ({"Nk": 8192}, 7),
        ({"Nk": 16384}, 3),
        ({"Nk": 16385}, 0),
        ({"Nk": 512, "B": 1, "Hq": 6, "Hkv": 6}, 7),
        ({"Nk": 512, "window": (None, 7)}, 33),
        ({"Nk": 513, "window": (None, 7)}, 52),
        ({"window": (None, None)}, 0),
        ({"window": (70, 0)}, 0),
        ({"D": 64, "Dv": 64}, 0),
        ({"D": 192}, 0),
        ({"Hq": 64}, 0),
        ({"enabled_options": frozenset({"block_mask"})}, 0),
    ],
    ids=str,
)
def test_heads_begin_apart(changed: dict[str, Any], apart: int) -> None:
    """One wave of key blocks, two or three, but no more heads than there are; and not by default.

    Each index is one key block: there is an inverse.
    """
    P = shaped("float16", 128, **{"B": 32, "Hq": 32, "Hkv": 32, "Nq": 512, "Nk": 512} | changed)
    P = replace(P, **{"window": CAUSAL} | changed)
    for deterministic in (True, False):
        launches = backward_launches(P, ON_HOPPER, deterministic=deterministic, sinks=False)
        found = schedule_of(P, contiguous_inputs(P), launches, CACHE)
        assert found.stagger == (apart if deterministic else 0)
        if found.stagger:
            assert found.head_groups == -(-P.B * P.Hkv // apart)
            assert found.inverse_stagger * apart % -(-P.Nk // 128) == (P.Nk > 128)


@pytest.mark.parametrize(
    ("Nk", "together"),
    [(1023, 17), (1024, 33), (2048, 16), (4096, 8), (12288, 3), (24576, 1), (1 << 17, 1)],
)
def test_runs_that_alternate_have_about_two_waves(Nk: int, together: int) -> None:
    """There they meet those of the first wave; others have one, if the cache holds no more."""
    P = shaped("float16", 128, B=50, Hq=32, Hkv=4, Nq=8192, Nk=Nk, window=CAUSAL)
    launches = backward_launches(P, ON_HOPPER, deterministic=False, sinks=False)
    assert schedule_of(P, contiguous_inputs(P), launches, CACHE).head_groups == -(-200 // together)


@pytest.mark.parametrize(
    ("changed", "run"),
    [
        ({}, 512),
        ({"D": 64, "Dv": 64}, 512),
        ({"D": 256, "Dv": 256}, 512),
        ({"window": (None, 7)}, 512),
        ({"Nk": 12288}, 5461),
        ({"Nk": 16384}, 8192),
        ({"Nk": 24576}, 16384),
        ({"Nk": 1 << 20}, 16384),
        ({"sequences": 9}, 0),
        ({"window": (None, None)}, 0),
        ({"window": (70, 0)}, 0),
        ({"Hq": 12}, 0),
        ({"Nk": 1023}, 0),
        ({"enabled_options": frozenset({"block_mask"})}, 0),
    ],
    ids=str,
)
def test_runs_of_grouped_heads_alternate(changed: dict[str, Any], run: int) -> None:
    """Under a causal mask, unless dq is summed in order: the bits of dk and dv follow from it."""
    for B, sm_count in ((1, 132), (50, 132), (1, 7)):
        P = shaped("float16", 128, B=B, Hq=32, Hkv=4, Nq=1024, Nk=1024, window=CAUSAL)
        P = replace(P, **changed)
        context = ON_HOPPER._replace(sm_count=sm_count)
        for deterministic in (True, False):
            launches = backward_launches(P, context, deterministic=deterministic, sinks=False)
            found = schedule_of(P, contiguous_inputs(P), launches, CACHE)
            assert found.run_keys == (0 if found.in_order else run)


@pytest.mark.parametrize("D", [64, 128, 192, 256])
def test_heads_that_share_keys_come_one_after_the_other_in_a_window(D: int) -> None:
    """Also where dq is summed in order; the bits of dk and dv follow from it."""

    def apart(**changed: Any) -> set[bool]:
        P = replace(shaped("float16", D, B=2, Hq=32, Hkv=4, Nq=2048, Nk=2048), **changed)
        made = (
            backward_launches(P, ON_HOPPER, deterministic=x, sinks=False) for x in (False, True)
        )
        kernels = HOPPER_BACKWARDS
        return {x.key.head_major for made in made for x in made if x.key.kernel in kernels}

    assert apart(window=(70, 0)) == apart(window=(70, None)) == {True}
    assert apart(window=(700, 665)) == {True}
    assert apart(window=(700, 666)) == apart(window=CAUSAL) == {False}
    assert apart(window=(70, 0), Hq=4) == apart(window=(70, 0), sequences=9) == {False}


@pytest.mark.parametrize(
    ("changed", "in_order", "together"),
    [
        # Of a wide window four waves of key blocks; of a narrow one as of other masks.
        ({"window": (1024, 0)}, (False, True), 16),
        ({"window": (600, 424)}, (False, True), 16),
        ({"window": (1024, None)}, (False,), 5),
        ({"window": (1023, 0)}, (False,), 9),
        ({"window": (1023, 0)}, (True,), 8),
        ({"window": (1024, 0), "Hq": 32}, (False,), 4),
        # In order, half a wave where keys are few and many heads share them.
        ({"window": CAUSAL, "Nq": 1024, "Nk": 1024}, (True,), 8),
        ({"window": CAUSAL, "Nq": 1025, "Nk": 1025}, (True,), 16),
        ({"window": CAUSAL, "Nq": 1024, "Nk": 1024, "Hq": 96}, (True,), 16),
        ({"window": CAUSAL, "Nq": 1024, "Nk": 1024, "D": 64, "Dv": 64}, (True,), 16),
    ],
    ids=str,
)
def test_how_many_heads_that_share_keys_run_together(
    changed: dict[str, Any], in_order: tuple[bool, ...], together: int
) -> None:
    sizes = {"B": 4, "Hq": 128, "Hkv": 32, "Nq": 4096, "Nk": 4096}
    P = replace(shaped("float16", 128, **sizes), **changed)
    for deterministic in in_order:
        launches = backward_launches(P, ON_HOPPER, deterministic=deterministic, sinks=False)
        found = schedule_of(P, contiguous_inputs(P), launches, CACHE)
        assert (found.head_groups, found.in_order) == (-(-128 // together), deterministic)
