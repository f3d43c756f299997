"""Ring attention: in a process with several devices, and where there is no mesh."""

from pathlib import Path

import pytest

from tests.jax.devices import run_on_devices

jax = pytest.importorskip("jax", reason="its devices run the ring: pip install jax")

from tileattn.jax import ring_attention  # noqa: E402 - JAX may be absent

SHARDED = Path(__file__).with_name("sharded.py")


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_several_devices(marked: str) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-m", marked)
    done = run_on_devices("-m", "pytest", *options, str(SHARDED))
    assert done.returncode == 0, done.stdout + done.stderr


def test_outside_of_shard_map() -> None:
    x = jax.numpy.zeros((3, 8))
    with pytest.raises(ValueError, match=r"must be called inside jax.shard_map"):
        ring_attention(x, x, x, axis_name="x")
