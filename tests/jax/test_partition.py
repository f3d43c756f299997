"""Arrays that are sharded over the batch or the heads; in a process with several devices."""

import pytest

from tests.jax.devices import run_on_devices

pytest.importorskip("jax")


@pytest.mark.parametrize(
    ("first", "every", "least"), [(0, 16, 15), pytest.param(1, 7, 40, marks=pytest.mark.slow)]
)
def test_each_device_computes_its_part(first: int, every: int, least: int) -> None:
    """Run a part of the cases, all of which take minutes; the process prints those that fail.

    The steps share no factor with the 15 options: every option comes with several shardings, and
    every sharding of either kind of mesh with several options.
    """
    done = run_on_devices("-m", "tests.jax.partitioned", str(first), str(every))
    printed = done.stdout.splitlines()
    assert len(printed) == 1, done.stdout + done.stderr
    assert int(printed[0].removesuffix(" done")) > least
