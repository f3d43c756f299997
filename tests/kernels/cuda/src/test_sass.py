"""No Hopper kernel releases a stage that it still reads: its machine code shows it."""

from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from tests.kernels.cuda.src.samples import READ_BY_SASS, READ_BY_SASS_PAIRS
from tests.kernels.cuda.src.test_compile import FIRST, as_launched, marks_of
from tileattn.kernels.cuda.families.hopper import HOPPER_BACKWARD, HOPPER_DS
from tileattn.kernels.cuda.families.key import KernelKey
from tileattn.kernels.cuda.jit.compile import SOURCES
from tools.check_sass import ARCH, findings
from tools.sass import Instruction, Section, disassembled, parsed

ARRIVE = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ"


# --- the Hopper kernels ---------------------------------------------------------------------------


def name_of(key: KernelKey) -> str:
    kind = "-packed" * key.packed + "-pieces" * key.split_kv
    return f"{key.kernel}-{key.head_dim}-{key.block_k}{kind}"


def in_turn(keys: list[KernelKey]) -> list[ParameterSet]:
    """Make keys parameters of slow tests that run when the kernel is compiled anyway."""
    return [pytest.param(key, marks=marks_of((ARCH, key)) or [pytest.mark.slow]) for key in keys]


@pytest.mark.parametrize("key", in_turn(READ_BY_SASS), ids=name_of)
def test_a_stage_is_given_back_after_it_has_been_read(key: KernelKey, program: str) -> None:
    assert findings(key, program) == []


def test_every_kernel_of_hopper_is_looked_at() -> None:
    # In kernels that sum dS only GEMMs read the stages.
    others = {"backward_dq_convert_sm90", *HOPPER_DS}
    own = {path.stem for path in SOURCES.glob("*_sm90.cu")} - others
    assert {key.kernel for key in READ_BY_SASS} == own


# --- pairs of thread blocks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", in_turn(READ_BY_SASS_PAIRS), ids=lambda key: f"{key.kernel}-{key.add_dq}"
)
def test_a_place_is_released_after_it_has_been_read(key: KernelKey, program: str) -> None:
    """At arrivals on a barrier of the other thread block, which then stores to the place."""
    remote = "SYNCS.ARRIVE.TRANS64.RED"
    sections = parsed(disassembled(as_launched(key, ARCH).image, program))
    assert any(x.opcode.startswith(remote) for section in sections for x in section.code)
    lasting = [pair for section in sections for pair in section.lasting()]
    assert not [load for arrival, load in lasting if arrival.opcode.startswith(remote)]


# --- a kernel that does, and one that does not ----------------------------------------------------

SOURCE = """
#include "tma_sm90.cuh"
struct Smem {{
    u64* barriers;
    float* numbers;
    __device__ Barrier stage_empty() const {{ return {{shared_address(barriers)}}; }}
}};
extern "C" __global__ void tiny(float* x) {{
    __shared__ u64 barriers[2];
    __shared__ float tile[256], sums[256];
    const Smem smem{{barriers, tile}};
    if (threadIdx.x == 0) smem.stage_empty().init(256);
    smem.numbers[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    const float read = smem.numbers[threadIdx.x ^ 1];
    {before}
    smem.stage_empty().arrive();
    x[threadIdx.x] = read + 1;
}}
"""


@pytest.mark.parametrize(
    ("before", "late"), [("", True), ("sums[threadIdx.x] = read; x[0] = sums[255];", False)]
)
def test_a_kernel_that_arrives_while_it_reads(
    before: str, late: bool, tmp_path: Path, program: str
) -> None:
    (tmp_path / "tiny.cu").write_text(SOURCE.format(before=before), encoding="utf-8")
    found = findings(KernelKey("tiny", "float32"), program, (SOURCES, tmp_path))
    assert [said.partition(": ")[2].partition(" at ")[0] for said in found] == (
        ["arrives on stage_empty"] if late else []
    )
    assert all("while numbers is read" in said for said in found)


def test_what_the_disassembler_says_is_read(program: str) -> None:
    key = FIRST[HOPPER_BACKWARD]
    (section,) = parsed(disassembled(as_launched(key, ARCH).image, program))
    assert section.name == key.kernel
    assert [x.address for x in section.code] == list(range(0, 16 * len(section.code), 16))
    assert all(x.places for x in section.code if x.arrives or x.loads_shared)
    assert sum(x.arrives for x in section.code) > 10


# --- which loads last -----------------------------------------------------------------------------


def step(text: str, scoreboard: int | None = None, waits: tuple[int, ...] = ()) -> tuple[str, int]:
    """Write an instruction and the upper half of its encoding."""
    number = 7 if scoreboard is None else scoreboard
    return text, number << 46 | sum(1 << 52 + n for n in waits)


def lasting(*steps: tuple[str, int] | str) -> list[int]:
    """Return the numbers of the loads in flight at an arrive; a single word is a label."""
    code: list[Instruction] = []
    labels = {}
    for one in steps:
        if isinstance(one, str):
            labels[one] = len(code)
        else:
            targets = (one[0].split("`(")[1].rstrip(")"),) if "`(" in one[0] else ()
            code.append(Instruction(len(code), one[0], one[1], targets, ()))
    return sorted({load.address for _, load in Section("k", tuple(code), labels).lasting()})


LOAD, USE, END = "LDS R2, [R3]", "FADD R4, R2, R2", step("EXIT")


def test_a_load_lasts_until_its_scoreboard_is_waited_for() -> None:
    assert lasting(step(LOAD, 1), step(ARRIVE), END) == [0]
    assert lasting(step(LOAD, 1), step(USE, waits=(1,)), step(ARRIVE), END) == []
    assert lasting(step(LOAD, 1), step(USE, waits=(0, 2, 3, 4, 5)), step(ARRIVE), END) == [0]
    assert lasting(step(LOAD, 1), step(ARRIVE, waits=(1,)), END) == []
    assert lasting(step(LOAD, 1), step("DEPBAR.LE SB1, 0x0"), step(ARRIVE), END) == []
    assert lasting(step(LOAD, 1), step("DEPBAR.LE SB1, 0x1"), step(ARRIVE), END) == [0]


def test_a_load_has_ended_where_one_behind_it_has() -> None:
    use = step(USE, waits=(1,))
    assert lasting(step(LOAD), step(LOAD, 1), use, step(ARRIVE), END) == []
    assert lasting(step(LOAD, 2), step(LOAD, 1), use, step(ARRIVE), END) == []
    assert lasting(step(LOAD, 1), step(LOAD, 2), use, step(ARRIVE), END) == [1]
    assert lasting(step(LOAD), step(f"@P0 {LOAD}", 1), use, step(ARRIVE), END) == [0]
    assert lasting(step(LOAD), step("LD.E R2, [R4]", 1), use, step(ARRIVE), END) == [0]


def test_a_load_lasts_if_it_does_on_one_path() -> None:
    skip, use = step("@P0 BRA `(join)"), step(USE, waits=(1,))
    assert lasting(step(LOAD, 1), skip, use, "join", step(ARRIVE), END) == [0]
    assert lasting(step(LOAD, 1), skip, END, "join", use, step(ARRIVE), END) == []
    # Complete on one of two paths, but not on the other.
    behind = (step(LOAD), step("@P0 BRA `(join)"), step(LOAD, 1), "join", use)
    assert lasting(*behind, step(ARRIVE), END) == [0]


def test_a_load_lasts_into_the_next_iteration_of_a_loop() -> None:
    loop = ("again", step(ARRIVE), step(LOAD, 1), step("@P0 BRA `(again)"), END)
    assert lasting(*loop) == [1]
    assert lasting(loop[0], step(USE, waits=(1,)), *loop[1:]) == []


def test_a_load_lasts_through_a_call() -> None:
    start, function = (step(LOAD, 1), step("CALL.REL.NOINC `(f)")), ("f", step("MOV R1, R2"))
    back = step("RET.REL.NODEC R4 `(k)")
    assert lasting("k", *start, step(ARRIVE), END, *function, back) == [0]
    assert lasting("k", *start, step(ARRIVE), END, *function, step(USE, waits=(1,)), back) == []


def test_a_jump_to_nobody_knows_where_is_no_answer() -> None:
    with pytest.raises(ValueError, match="where to is not known"):
        lasting(step(LOAD, 1), step("BRX R4 -0x10"), step(ARRIVE), END)
