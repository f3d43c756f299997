"""Kernels that may start early wait before they touch memory: their machine code shows it."""

import functools
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.cuda.src.test_compile import FIRST, FIRST_FLAGGED, as_launched
from tileattn.kernels.cuda.families.hopper import (
    HOPPER_BACKWARDS,
    HOPPER_DQ_CONVERT,
    HOPPER_WIDE_DQ,
)
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.families.split import COMBINE, FOLD
from tileattn.kernels.cuda.jit.compile import SOURCES
from tools.check_sass import ARCH
from tools.sass import Instruction, Section, disassembled, parsed

# Not part of a plan, so launched without programmatic dependent launch.
ALONE = {
    "append_kv",
    "append_quantised",
    "cascade_tables",
    "merge_rows",
    "rope",
    "join_rows",
    "add_halves",
    "add_rows",
    "store_values",
}

OF_PLANS = {kernel: key for kernel, key in FIRST.items() if kernel not in ALONE}

# Instructions that read or write global memory, or may do so.
_GLOBAL = {
    *("LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG"),
    *("UBLKCP", "UBLKPF", "UBLKRED", "UTMALDG", "UTMAPF", "UTMASTG", "UTMAREDG"),
}


_WAIT = "ACQBULK"


def too_early(
    section: Section, kinds: Container[str] = (*_GLOBAL, "EXIT"), waits: Container[str] = (_WAIT,)
) -> list[Instruction]:
    """List accesses to global memory, and exits, that some thread reaches before it has waited.

    ``waits`` are the opcodes after which they are not too early.
    """
    following = section.successors()
    found, seen, waiting = [], {0}, [0]
    while waiting:
        instruction = section.code[n := waiting.pop()]
        if instruction.opcode in waits and not instruction.guarded:
            continue
        if instruction.opcode.partition(".")[0] in kinds:
            found.append(instruction)
        new = set(following[n]) - seen
        seen |= new
        waiting += new
    return found


# Kernels whose CTAs fill an SM: the next kernel has nothing to do before they all end.
_ONE_AN_SM = (
    "daux_sm90",
    "dbias_sm90",
    "wide_dq_sm90",
    "forward_sm90",
    "latent_sm90",
    "forward_wide_sm90",
    "forward_float32_sm90",
    "float32_dq_sm90",
)

# Kernels that start while the previous one runs, and what precedes all other accesses: a load that
# tells what is complete, or a fence that invalidates the L1 cache.
_BEGIN = {"backward_dq_convert_sm90": "LDG.E.STRONG.GPU"} | dict.fromkeys(
    (*HOPPER_BACKWARDS, HOPPER_WIDE_DQ), "CCTL.IVALL"
)
_JOINING = COMBINE, FOLD
_BEGIN |= dict.fromkeys(_JOINING, "CCTL.IVALL")
_ORDERS = "order_key_blocks"  # starts early, too, and waits before it stores


@functools.cache
def section_of(key: KernelKey, program: str, folders: tuple[Path, ...] = (SOURCES,)) -> Section:
    (section,) = parsed(disassembled(as_launched(key, ARCH, folders).image, program))
    return section


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(x, marks=[pytest.mark.slow] * (x not in _BEGIN)) for x in sorted(OF_PLANS)],
)
def test_a_kernel_waits_first(kernel: str, program: str) -> None:
    section = section_of(OF_PLANS[kernel], program)
    if kernel not in (*_BEGIN, _ORDERS):
        assert too_early(section) == []
    lets = any(x.opcode == "PREEXIT" and not x.guarded for x in section.code)
    assert lets != kernel.endswith(_ONE_AN_SM)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(FIRST_FLAGGED))
def test_a_kernel_of_flagged_heads_waits_first(kernel: str, program: str) -> None:
    assert too_early(section_of(FIRST_FLAGGED[kernel], program)) == []


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", sorted(_BEGIN))
def test_a_kernel_that_starts_early_looks_first(kernel: str, packed: bool, program: str) -> None:
    """For packed sequences it waits, unless it converts dq or joins splits."""
    section = section_of(replace(OF_PLANS[kernel], packed=packed), program)
    early = kernel in (HOPPER_DQ_CONVERT, *_JOINING)
    assert (too_early(section, _GLOBAL) == []) == (packed and not early)
    first = "CCTL.IVALL" if packed and early else _BEGIN[kernel]  # before it reads offsets
    assert too_early(section, _GLOBAL, (_WAIT, first)) == []
    assert any(x.opcode == _WAIT for x in section.code)


def test_the_order_of_key_blocks_is_stored_after_the_wait(program: str) -> None:
    """Before it the kernel reads offsets, after it has emptied the L1 cache."""
    section = section_of(OF_PLANS[_ORDERS], program)
    assert too_early(section, ("ST", "STG", "EXIT")) == []
    assert too_early(section, waits=("CCTL.IVALL",)) == []


def test_every_kernel_of_a_plan_is_checked() -> None:
    assert set(OF_PLANS) | ALONE == {path.stem for path in SOURCES.glob("*.cu")}


@pytest.mark.parametrize(
    ("before", "behind", "found"),
    [
        ("overlap_launches();", "", []),
        ("wait_for_prerequisites();", "if (*p) return;", []),
        ("if (n > 3) return; overlap_launches();", "", ["EXIT"]),
        ("if (n > 3) overlap_launches();", "", ["LDG", "STG", "EXIT"]),
        ("const int x = *p; overlap_launches();", "p[1] = x;", ["LDG"]),
        ("launch_dependents();", "", ["LDG", "STG", "EXIT"]),
    ],
)
def test_what_comes_too_early_is_found(
    tmp_path: Path, program: str, before: str, behind: str, found: list[str]
) -> None:
    (tmp_path / "tiny.cu").write_text(
        f"""#include "griddep.cuh"
        extern "C" __global__ void tiny(volatile int* p, int n) {{ {before} {behind} ++*p; }}""",
        encoding="utf-8",
    )
    key = KernelKey("tiny", "float32")
    told = too_early(section_of(key, program, (SOURCES, tmp_path)))
    assert {x.opcode.partition(".")[0] for x in told} == set(found), told
