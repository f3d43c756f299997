"""Machine code of a Hopper kernel: its instructions, where control goes, and which loads last.

An instruction waits for others by scoreboards, six counters of a warp: a load adds one to the
counter that its encoding names, and takes it back when its numbers have come. An instruction whose
wait mask names a counter issues when that is zero. What ptxas waits for it knows from registers
alone: a barrier in shared memory is nothing that it waits at.
"""

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

Place = tuple[str, int]
"""Name of a source and line in it."""

_NO_SCOREBOARD = 7

_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\S+?),")
_LABEL = re.compile(r"^(\S+):\s*$")
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)(?: inlined at)?')
_FIRST = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/")
_SECOND = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\(([^)]+)\)")


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int  # in its section
    text: str
    high: int  # upper half of its encoding, with the control information
    targets: tuple[str, ...]  # labels that it names
    places: tuple[Place, ...]  # where it comes from, then the line which that was inlined at, ...

    @property
    def guarded(self) -> bool:
        """True if a predicate guards the instruction."""
        return self.text.startswith("@")

    @property
    def opcode(self) -> str:
        """The operation, with its modifiers."""
        return self.text.split()[1 if self.guarded else 0]

    @property
    def waits(self) -> tuple[int, ...]:
        """Scoreboards that are zero when it issues, be it guarded or not."""
        zero = re.match(r"DEPBAR\.LE SB(\d), 0x0", self.text)
        masked = tuple(n for n in range(6) if self.high >> 52 + n & 1)
        return (*masked, int(zero[1])) if zero else masked

    @property
    def scoreboard(self) -> int | None:
        """The counter that tells when its result has come; None where it has none."""
        number = self.high >> 46 & 7
        return None if number == _NO_SCOREBOARD else number

    @property
    def loads_shared(self) -> bool:
        """True if it reads shared memory into registers, or may do so.

        ptxas writes a load that never does, ``@!PT LDS``, before a ``cp.async``.
        """
        loads = self.opcode.partition(".")[0] in {"LDS", "LDSM", "LD"}
        return loads and not self.text.startswith("@!PT ")

    @property
    def tells_of_others(self) -> bool:
        """True if earlier loads of shared memory have completed when its own has."""
        return self.opcode.startswith("LDS") and not self.guarded

    @property
    def arrives(self) -> bool:
        """True if it arrives on a barrier in shared memory."""
        return self.opcode.startswith("SYNCS.ARRIVE")


@dataclass(frozen=True, slots=True)
class Section:
    """The code of a kernel and of the functions that it calls."""

    name: str
    code: tuple[Instruction, ...]
    labels: dict[str, int]  # number of the instruction after each

    def successors(self) -> list[tuple[int, ...]]:
        """For each instruction, the possible next ones. A return leads to after any call."""
        called = tuple(n + 1 for n, x in enumerate(self.code) if x.opcode.startswith("CALL"))
        joined = {
            self.labels[t] for x in self.code if x.opcode.startswith("BSSY") for t in x.targets
        }
        found = []
        for n, x in enumerate(self.code):
            kind = x.opcode.partition(".")[0]
            further = [n + 1] if n + 1 < len(self.code) else []
            if kind in {"BRX", "BRXU", "JMP", "JMX", "JMXU", "BMOV"}:
                raise ValueError(f"{self.name}: {x.address:04x} {x.text}: where to is not known")
            if kind == "BSYNC" and n + 1 not in joined:
                raise ValueError(f"{self.name}: {x.address:04x} {x.text} joins nothing")
            targets = [] if kind == "BSSY" else [self.labels[t] for t in x.targets]
            if kind == "RET":
                targets = list(called)
            # A branch may have a condition among its operands, too.
            always = x.text.startswith(("EXIT", "RET", "CALL", "BRA `")) and not x.guarded
            found.append((*targets, *(() if always else further)))
        return found

    def lasting(self) -> list[tuple[Instruction, Instruction]]:
        """Find arrivals, and loads of shared memory that on some path are under way at them."""
        before: list[_Loads] = [_Loads() for _ in self.code]
        following = self.successors()
        waiting = list(range(len(self.code)))
        while waiting:  # until nothing is added to any set
            n = waiting.pop()
            after = before[n].after(n, self.code[n])
            waiting += [m for m in following[n] if before[m].add(after)]
        return [
            (x, load)
            for n, x in enumerate(self.code)
            if x.arrives and (left := before[n].waited(x).under_way)
            for m, load in enumerate(self.code)
            if left >> m & 1
        ]


@dataclass(slots=True)
class _Loads:
    """Loads under way before an instruction, on some path: numbers are sets, a bit for each.

    Loads of shared memory end in the order in which they began. ptxas relies on it, and gives some
    of them no scoreboard: where the counter of a load is zero, those before it have ended, too.
    """

    under_way: int = 0
    # Those of which each scoreboard tells nothing.
    untold: list[int] = field(default_factory=lambda: [0] * 6)

    def waited(self, x: Instruction) -> "_Loads":
        """Return the loads still in flight when an instruction issues."""
        left = self.under_way
        for scoreboard in x.waits:
            left &= self.untold[scoreboard]
        return _Loads(left, [loads & left for loads in self.untold])

    def after(self, number: int, x: Instruction) -> "_Loads":
        """Return the loads in flight after an instruction."""
        loads = self.waited(x)
        if x.loads_shared:
            if x.scoreboard is not None and x.tells_of_others:
                loads.untold[x.scoreboard] = 0
            loads.under_way |= 1 << number
            for scoreboard in range(6):
                if scoreboard != x.scoreboard:
                    loads.untold[scoreboard] |= 1 << number
        return loads

    def add(self, other: "_Loads") -> bool:
        """Take in what is under way on another path; whether that is anything new."""
        old = self.under_way, *self.untold
        self.under_way |= other.under_way
        self.untold = [a | b for a, b in zip(self.untold, other.untold, strict=True)]
        return old != (self.under_way, *self.untold)


def nvdisasm() -> str | None:
    """Find the disassembler: of the wheel nvidia-cuda-nvdisasm first, then of a toolkit."""
    spec = find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        if found := sorted(Path(folder).glob("*/bin/nvdisasm*")):
            return str(found[-1])
    return shutil.which("nvdisasm")


def disassembled(image: bytes, program: str) -> str:
    """Disassemble machine code, with the encodings and the source lines of its instructions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(image)
        command = [program, "-c", "-gi", "-hex", str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def parsed(listing: str) -> list[Section]:
    """Read the sections, one for each kernel."""
    sections: list[Section] = []
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    places: list[Place] = []
    chain_ends = True
    first: re.Match[str] | None = None
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            code, labels = [], {}
            sections.append(Section(section[1], (), labels))
        elif found := _LINE.search(line):
            if chain_ends:
                places = []
            places.append((Path(found[1]).name, int(found[2])))
            chain_ends = "inlined at" not in line
        elif label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif here := _FIRST.match(line):
            first = here
        elif first and (here := _SECOND.match(line)):
            text = re.sub(r"\s+", " ", first[2])
            targets = tuple(_TARGET.findall(text))
            at, high = int(first[1], 16), int(here[1], 16)
            code.append(Instruction(at, text, high, targets, tuple(places)))
            sections[-1] = Section(sections[-1].name, tuple(code), labels)
            first = None
    return sections
