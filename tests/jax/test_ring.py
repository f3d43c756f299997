"""Ring attention: in a process with several devices, and where there is no mesh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax", reason="its devices run the ring: pip install jax")

from tileattn.jax import ring_attention  # noqa: E402 - JAX may be absent

HERE = Path(__file__).parent


def test_on_several_devices() -> None:
    """A host has as many devices as it is told before JAX starts."""
    flags = "--xla_force_host_platform_device_count=4"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "sharded.py"]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command,
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_outside_of_shard_map() -> None:
    x = jax.numpy.zeros((3, 8))
    with pytest.raises(ValueError, match=r"is called inside jax.shard_map over a mesh that has it"):
        ring_attention(x, x, x, axis_name="x")
