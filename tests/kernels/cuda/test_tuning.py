"""Every tuned number says where it comes from, and calls can be planned with another value."""

from dataclasses import replace

import pytest

from tests.kernels.cuda.plan.planning import H200, asked, backward, forward
from tileattn.kernels.cuda.tuning import about, names

CAUSAL = (None, 0)
CALLS = [
    asked("bfloat16", B=2, Hq=16, Hkv=4, Nq=n, Nk=n, D=dim, Dv=dim, window=window)
    for n in (512, 5000)
    for dim in (64, 128, 256)
    for window in ((None, None), CAUSAL, (700, 0))
]
DECODE = asked("bfloat16", B=2, Hq=64, Hkv=1, Nq=1, Nk=9000, D=128, Dv=128)


@pytest.mark.parametrize("name", names())
def test_a_number_has_a_source_and_can_be_turned_off(name: str) -> None:
    facts = about(name)
    assert all(facts[fact] for fact in ("unit", "when", "source"))
    assert facts["off"] != getattr(H200.tuning, name)
    device = replace(H200, tuning=replace(H200.tuning, **{name: facts["off"]}))
    for problem in (*CALLS, DECODE):
        plan = forward(problem, device)
        assert all(launch.shared_bytes <= device.shared_limit for launch in plan.launches)
    for problem in CALLS:
        for deterministic in (False, True):
            assert backward(problem, device, deterministic=deterministic).launches
