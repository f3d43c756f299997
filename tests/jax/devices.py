"""Processes whose host has several devices: JAX must be told before it starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Most of the time of these tests is XLA's compiler; the level changes only how it optimises loops.
DEVICES = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
}


def run_on_devices(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run Python with four devices, and capture what it prints."""
    command = [sys.executable, *arguments]
    environment = os.environ | DEVICES
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=timeout
    )
