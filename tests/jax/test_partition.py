"""Arrays that are sharded over the batch or the heads; in a process with several devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

ROOT = Path(__file__).parents[2]
EVERY = 3  # a part of the cases; all of them take minutes


def test_each_device_computes_its_part() -> None:
    """What it prints are the cases that fail."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.jax.partitioned", "0", str(EVERY)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | flags | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    printed = done.stdout.splitlines()
    assert len(printed) == 1, done.stdout + done.stderr
    assert int(printed[0].removesuffix(" done")) > 90
