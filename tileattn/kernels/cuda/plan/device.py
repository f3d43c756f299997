"""Properties of a GPU that a plan needs; the GPU need not be present."""

import re
from dataclasses import dataclass

from tileattn.kernels.cuda.tuning import DEFAULT, Tuning, tuning_of


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU."""

    name: str  # for reports
    arch: str  # architecture that kernels are compiled for, such as "sm_90a"
    sm_count: int
    shared_limit: int  # bytes of shared memory per thread block
    l2_bytes: int
    tuning: Tuning = DEFAULT


# By compute capability times ten: a GPU, its SMs, KiB of shared memory per thread block, MiB of L2.
# CUDA reports the figures of the H200. SMs and L2 of the others are published figures that no run
# has confirmed; they only decide what is said about a GPU that is not there.
GPUS = {
    75: ("T4", 40, 64, 4),
    80: ("A100", 108, 163, 40),
    86: ("RTX 3090", 82, 99, 6),
    87: ("Jetson AGX Orin", 16, 163, 4),
    89: ("L40S", 142, 99, 96),
    90: ("H200", 132, 227, 50),
    100: ("B200", 148, 227, 126),
    103: ("B300", 148, 227, 126),
    120: ("RTX 5090", 170, 99, 96),
}


def device_of_arch(arch: str) -> Device:
    """Describe a GPU of an architecture, ``"sm_90a"`` or ``"compute_80"``, or the next older one.

    Kernels are compiled for ``arch`` as given. Raises ValueError if ``arch`` is no architecture, or
    older than the kernels support.
    """
    found = re.fullmatch(r"(?:sm|compute)_(\d+)[a-z]?", arch)
    known = [number for number in GPUS if found and number <= int(found[1])]
    if not known:
        names = ", ".join(f"sm_{number}" for number in GPUS)
        raise ValueError(f"arch must be one of {names}, or newer; got {arch!r}")
    name, sm_count, shared, l2 = GPUS[max(known)]
    return Device(name, arch, sm_count, shared * 1024, l2 << 20, tuning_of(arch))
